"""Draws the transition table as SVG: `python -m zerocopy.handoff.diagram > docs/states.svg`.

Every drawing is made from `TRANSITIONS` alone, the same bytes every time, so a test can tell whether the file in the
docs is current. Each role is a column: the way to COMMITTED runs down, the trapdoor ABORTED stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape

from zerocopy.handoff.states import REMOTE, TRANSITIONS, Event, Role, State

_BOX_W, _BOX_H, _STEP = 250, 46, 92
_LABEL_W, _ABORT_W, _GAP, _TOP = 150, 100, 70, 84
_COLUMN: Final = _BOX_W + _LABEL_W + _ABORT_W + _GAP

_HEAD: Final = """<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}">
<title>States of a handoff</title>
<!-- drawn from zerocopy/handoff/states.py by python -m zerocopy.handoff.diagram; do not edit -->
<style>
text {{ font: 12px sans-serif; fill: #222 }} .role {{ font-size: 17px; font-weight: bold }}
.state {{ font-weight: bold; text-anchor: middle }} .loop {{ font-size: 11px; text-anchor: middle }}
rect {{ fill: #eef3fa; stroke: #456 }} .aborted {{ fill: #fbecea }} .committed {{ fill: #e9f6ea }}
.remote {{ fill: #a03a00; font-style: italic }} line {{ stroke: #456; marker-end: url(#arrow) }}
</style>
<defs><marker id="arrow" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">
<path d="M0,0 L8,4 L0,8 z" fill="#456"/></marker></defs>"""


def svg() -> str:
    rows = max(len(_chain(role)) for role in Role)
    width, height = 2 * _COLUMN, _TOP + rows * _STEP - 20
    lines = [_HEAD.format(w=width, h=height)]
    lines.append(
        _text(20, 24, "upright: this host decides; ", rest='<tspan class="remote">italic: the peer sent it</tspan>')
    )
    for column, role in enumerate(Role):
        lines += _draw(role, 20 + column * _COLUMN, rows)
    return "\n".join([*lines, "</svg>", ""])


def _chain(role: Role) -> list[State]:
    """The states on the way to success, in order; RELEASED last."""
    return [s for s in State if s in TRANSITIONS[role] and s is not State.ABORTED]


def _draw(role: Role, x: int, rows: int) -> Iterator[str]:
    chain = _chain(role)
    rows_y = [_TOP + (rows - len(chain) + i) * _STEP for i in range(len(chain))]
    y = dict(zip(chain, rows_y, strict=True))
    abort_x = x + _BOX_W + _LABEL_W
    abort_h = y[State.COMMITTED] - rows_y[0] - _STEP + _BOX_H
    yield _text(x, _TOP - 22, role.value, "role")
    yield _box(abort_x, rows_y[0], _ABORT_W, abort_h, State.ABORTED, "")
    for state in chain:
        width = abort_x + _ABORT_W - x if state is State.RELEASED else _BOX_W
        loops = _names(role, [e for e, to in TRANSITIONS[role][state].items() if to is state])
        yield _box(x, y[state], width, _BOX_H, state, loops)
    for state in [*chain, State.ABORTED]:
        yield from _edges(role, state, x, abort_x, y)


def _edges(role: Role, state: State, x: int, abort_x: int, y: dict[State, int]) -> Iterator[str]:
    targets = {to: None for to in TRANSITIONS[role][state].values() if to is not state}
    for to in targets:
        names = _names(role, [e for e, t in TRANSITIONS[role][state].items() if t is to])
        if to is State.ABORTED:
            middle = y[state] + _BOX_H // 2
            yield _line(x + _BOX_W, middle, abort_x, middle)
            yield _text(x + _BOX_W + 8, middle - 6, rest=names)
            continue
        middle = abort_x + _ABORT_W // 2 if state is State.ABORTED else x + _BOX_W // 2
        start = y[State.COMMITTED] - _STEP if state is State.ABORTED else y[state]
        yield _line(middle, start + _BOX_H, middle, y[to])
        yield _text(middle + 8, (start + _BOX_H + y[to]) // 2 + 4, rest=names)


def _names(role: Role, events: list[Event]) -> str:
    spans = (
        f'<tspan class="remote">{escape(e.value)}</tspan>' if e in REMOTE[role] else escape(e.value) for e in events
    )
    return ", ".join(spans)


def _box(x: int, y: int, width: int, height: int, state: State, loops: str) -> str:
    middle, centre = x + width // 2, y + height // 2
    lines = [f'<rect class="{state.value}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>']
    lines.append(_text(middle, centre - 4 if loops else centre + 4, state.value.upper(), "state"))
    if loops:
        lines.append(_text(middle, centre + 14, "stays: ", "loop", loops))
    return "\n".join(lines)


def _line(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _text(x: int, y: int, plain: str = "", style: str = "", rest: str = "") -> str:
    attribute = f' class="{style}"' if style else ""
    return f'<text{attribute} x="{x}" y="{y}">{escape(plain)}{rest}</text>'


if __name__ == "__main__":
    print(svg(), end="")
