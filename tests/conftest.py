"""Puts the scripts on the path; `shared` is a folder of real data beside the repository, and tests skip without it."""
import os
import pathlib
import sys

import pytest

os.environ.setdefault('OMP_NUM_THREADS', '1')       # tiny tensors: threads that wait for each other only cost time
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@pytest.fixture
def shared():
    folder = ROOT.parent / 'shared'
    if not folder.is_dir():
        pytest.skip('no ../shared with real data')
    return folder
