"""docs/configuration.md, written from `zerocopy.config`: `python -m zerocopy.cli.reference > docs/configuration.md`."""

from __future__ import annotations

from typing import Final

from zerocopy.config import Setting, default_text, literal_choices, settings

_INTRODUCTION: Final = """\
# Configuration

Generated from `zerocopy/config.py` by `python -m zerocopy.cli.reference > docs/configuration.md`; a test checks it.

Every setting of `zc-handoff daemon` can be given three ways. Later ones win: the default, the TOML file, the
environment, the flag. The file is `--config FILE`, else `ZC_CONFIG`, else `~/.config/zc-handoff/config.toml` if it
exists. Unknown keys and unknown `ZC_*` variables are errors. In TOML, peers are a table:

```toml
role = "decode"
model = "/models/model.gguf"
placement = "disaggregated"

[peers]
prefill-1 = "10.0.0.1:7600"
prefill-2 = ["10.0.0.2:7600", "192.168.7.2:7600"]
```

In the environment they are `ZC_PEERS="prefill-1=10.0.0.1:7600,prefill-2=10.0.0.2:7600"`.
"""

_EXIT_CODES: Final = """\
## Exit codes of `zc-handoff`

| code | meaning |
|---|---|
| 0 | done |
| 1 | it ran and failed: a check, a comparison or a file did |
| 2 | the command line or the configuration is wrong |
| 3 | refused or unavailable: no daemon there, not serving, wrong key |
| 130 | interrupted |
"""


def reference() -> str:
    """docs/configuration.md."""
    parts = [_INTRODUCTION]
    groups: dict[str, list[Setting]] = {}
    for setting in settings():
        groups.setdefault(setting.group, []).append(setting)
    for group, members in groups.items():
        rows = [_row(setting) for setting in members]
        parts.append(
            "\n".join(
                [f"## {group}", "", "| TOML | flag | environment | default | meaning |", "|---|---|---|---|---|", *rows]
            )
        )
        parts[-1] += "\n"
    parts.append(_EXIT_CODES)
    return "\n".join(parts)


def _row(setting: Setting) -> str:
    choices = literal_choices(setting)
    meaning = setting.text + (f" One of {', '.join(f'`{c}`' for c in choices)}." if choices else "")
    flag = setting.flag
    if isinstance(setting.default, bool):
        flag = f"{flag}`, `--no-{flag[2:]}"
    elif setting.metavar:
        flag = f"{flag} {setting.metavar}"
    return f"| `{setting.name}` | `{flag}` | `{setting.env}` | {default_text(setting)} | {meaning} |"


if __name__ == "__main__":
    print(reference(), end="")
