"""Formulas and rules: what they mean, and that nothing else is accepted."""

from __future__ import annotations

import pytest

from pyruntime.cubin.expression import Address, Formula, Rule
from pyruntime.errors import InputError

VALUES = {"TQ": 64, "TKV": 32, "hd": 128, "unknown": None, "arch": "sm_90a"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3*TQ*(hd+8)*2 + TQ*TKV*4 + 3*TQ*4", 61184),
        ("max((TQ + 2*TKV)*(hd+8)*2, TQ*hd*4)", 34816),
        ("min(TQ, TKV, 7)", 7),
        ("-TQ // 5", -13),
        (" TQ ", 64),
    ],
)
def test_formulas(text: str, value: int) -> None:
    assert Formula(text)(VALUES) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "TQ.bit_length()", "TQ ** TQ", "TQ / 2", "TQ % 3",
        "[TQ]", "TQ if TQ else 1", "lambda: 1", "f'{TQ}'", "TQ << 100", "1.5", "'a'", "True",
        "max(TQ)", "max(*TQ)", "max(TQ, key=TQ)", "abs(TQ)", "TQ == 64", "TQ and 1", "(x := 1)",
        "", "TQ +", "TQ;TQ", "\0", "(" * 900, "-" * 900 + "1", "1+" * 600 + "1", "None", "print",
    ],
)  # fmt: skip
def test_nothing_else_is_a_formula(text: str) -> None:
    with pytest.raises(InputError):
        Formula(text)(VALUES)


def test_errors_name_the_formula_and_what_is_known() -> None:
    with pytest.raises(InputError, match=r"'TX \+ 1': no value for TX; known are TKV, TQ"):
        Formula("TX + 1")({"TQ": 1, "TKV": 2})
    with pytest.raises(InputError, match="'1 // TQ': integer division"):
        Formula("1 // TQ")({"TQ": 0})
    with pytest.raises(InputError, match="'TQ - arch == 1': unsupported operand"):
        Rule("TQ - arch == 1").holds(VALUES)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("TQ == 64 and TKV <= 32", True),
        ("TQ < 64 or TKV > 31", True),
        ("not TQ == 64", False),
        ("16 <= TKV < 32", False),
        ("arch == 'sm_90a' and TQ != 1", True),
        ("unknown <= 5", None),
        ("not unknown <= 5", None),
        ("unknown <= 5 or TQ == 64", True),
        ("unknown <= 5 or TQ == 1", None),
        ("unknown <= 5 and TQ == 1", False),
        ("unknown <= 5 and TQ == 64", None),
        ("unknown + TQ > 0", None),
        ("1 < TQ < unknown", None),
        ("100 < TQ < unknown", False),
    ],
)
def test_rules_with_unknowns(text: str, holds: bool | None) -> None:
    assert Rule(text).holds(VALUES) is holds


def test_addresses_have_two_operators_more() -> None:
    swizzled = Address("lane % 8 * 128 + (lane // 8 ^ lane % 8) * 16")
    assert [swizzled({"lane": lane}) for lane in (0, 1, 8, 31)] == [0, 144, 16, 960]
    with pytest.raises(InputError, match="max min % \\^"):
        Address("lane ** 2")


def test_margins() -> None:
    rule = Rule("TQ <= 70 and (TKV < 40 or hd == 130) and hd >= 5")
    assert rule.margins(VALUES) == {"TQ": 6, "TKV": 7, "hd": 2}


def test_rules_know_decimals() -> None:
    rule = Rule("slots <= 12.75 and TQ < 64.5 and hd < 130")
    values = {**VALUES, "slots": 12.5}
    assert rule.holds(values) and not rule.holds({**values, "slots": 12.875})
    assert rule.margins(values) == {"slots": 0.25, "TQ": 0.5, "hd": 130 - 128 - 1}
    with pytest.raises(InputError):
        Formula("2.5 * TQ")
