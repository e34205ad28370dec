"""Puts the scripts on the path, and what the tests of several scripts share; `shared` is a folder of real data beside
the repository, and tests skip without it."""
import os
import pathlib
import signal
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


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Each test works in its own folder, as if alone."""
    monkeypatch.chdir(tmp_path)
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def run_main(monkeypatch, capsys):
    """run_main(script, '--key=value', ...) -> (status, stdout, stderr) of the module's main(), in this process."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}

    def call(script, *words):
        monkeypatch.setattr(sys, 'argv', [f'{script.__name__}.py', *map(str, words)])
        capsys.readouterr()
        try:
            status = script.main() or 0
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()
    yield call
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
