"""Fuzzy logic on tensors in [0,1]: the connectives of both papers (product t-norm; paper A, section 1; paper B, eq 13).

    a  b | a and b   a or b    not a   a and not b
         | a*b       a+b-ab    1-a     a*(1-b)
    -----+------------------------------------------
    0  0 | 0         0         1       0
    0  1 | 0         1         1       0
    1  0 | 0         1         0       1
    1  1 | 1         1         0       0

At 0 and 1 they are Boolean logic; in between they are smooth, stay in [0,1] and are monotone in each argument (falling
where it is negated). A feature direction has no "not", but a membership does: 1 - a is as positive as a. That is why
operands are bounded.
"""


def fuzzy_and(x, dim=-1):
    """Product of memberships along dim, which is removed (paper B, eq 13)."""
    return x.prod(dim)


def fuzzy_or(x, dim=-1):
    """1 - prod(1 - x) along dim, which is removed: De Morgan's dual of fuzzy_and (paper B, eq 13)."""
    return 1 - (1 - x).prod(dim)


def fuzzy_not(x):
    """1 - x, elementwise (paper B, eq 13)."""
    return 1 - x


def and_not(a, b):
    """a * (1 - b), elementwise: "a but not b", the set difference of paper A."""
    return a * (1 - b)
