"""Settings: where they come from, which wins, and what a mistake says. Also that docs/configuration.md is current."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from zerocopy import config
from zerocopy.cli import reference
from zerocopy.config import ConfigError, DaemonConfig, load
from zerocopy.daemon.core import worker_options
from zerocopy.runtime.llama import engine


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to name as the model, and a home without a configuration."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    return file


def toml(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "zc.toml"
    file.write_text(text)
    return file


def test_flags_win_over_the_environment_over_the_file_over_defaults(model: Path, tmp_path: Path) -> None:
    file = toml(tmp_path, f'model = "{model}"\nrings = 5\nstreams = 5\nn_ctx = 555\n')
    settled = load({"n_ctx": "777"}, {"ZC_STREAMS": "6", "ZC_N_CTX": "666"}, file)
    assert (settled.rings, settled.streams, settled.n_ctx) == (5, 6, 777)
    assert settled.ring_mib == DaemonConfig().ring_mib
    assert settled.model == model


def test_the_file_is_named_by_flag_or_environment_or_found_at_home(model: Path, tmp_path: Path) -> None:
    named = toml(tmp_path, "rings = 7")
    flags = {"model": str(model)}
    assert load(flags, {"ZC_CONFIG": str(named)}).rings == 7
    assert load(flags, {}).rings == DaemonConfig().rings
    home = Path(config.CONFIG_FILE).expanduser()
    home.parent.mkdir(parents=True)
    home.write_text("rings = 8")
    assert load(flags, {}).rings == 8
    assert load(flags, {"ZC_CONFIG": str(named)}).rings == 7
    with pytest.raises(ConfigError, match="No such file"):
        load(flags, {}, tmp_path / "absent.toml")


def test_every_setting_can_be_given_in_all_three_ways(model: Path, tmp_path: Path) -> None:
    """Text from flags and environment means what the same value means in TOML."""
    key_file = tmp_path / "key"
    key_file.write_text("k\n")
    samples: dict[str, Any] = {
        "name": "n1", "role": "decode", "model": str(model), "listen": "[::1]:1", "advertise": "10.0.0.1:2",
        "http": "127.0.0.1:3", "peers": {"a": "10.0.0.2:4"}, "keys": "/k", "streams": 3, "n_ctx": 640,
        "chunk_tokens": 128, "page_tokens": 32, "kv_type": "q8_0", "flash_attention": "off", "threads": 2, "mtp": "off",
        "batch_invariant": True, "cores": "shared",
        "sequences": 3, "kv_tokens": 9000, "queue": 7, "tenant_requests": 5, "api_keys": {"ann": "k2"},
        "ring_mib": 9, "rings": 2, "placement": "disaggregated", "allow_fallback": False, "probe": False,
        "allow_proofs": True, "queue_s": 1.5, "transfer_s": 2, "request_s": 3, "drain_s": 4,
            "engine_call_s": 5, "api_key": "abc",
        "api_key_file": str(key_file), "log_level": "debug", "log_format": "json",
    }  # fmt: skip
    for setting in config.settings():
        assert setting.name in samples, f"no sample of {setting.name}"
        value = samples[setting.name]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        many = isinstance(value, dict)
        if many:
            text = ",".join(f"{name}={one}" for name, one in value.items())
        base = {} if setting.name == "model" else {"model": str(model)}
        if setting.name == "page_tokens":
            base["chunk_tokens"] = "128"
        if setting.name == "kv_tokens":
            base["n_ctx"] = "640"
        table = ", ".join(f'{name} = "{one}"' for name, one in value.items()) if many else ""
        line = f"{setting.name} = {{{table}}}" if many else f"{setting.name} = {_toml_value(value)}"
        ways = [
            load(base | {setting.name: [text] if many else text}, {}),
            load(base, {setting.env: text}),
            load(base, {}, toml(tmp_path, line)),
        ]
        seen = [getattr(way, setting.name) for way in ways]
        assert seen[0] == seen[1] == seen[2] != setting.default, setting.name


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_peers_may_have_several_addresses_in_order(model: Path, tmp_path: Path) -> None:
    expected = {"a": ("10.0.0.1:1", "[fe80::1%eth0]:2"), "b": ("c:3",)}
    table = toml(tmp_path, '[peers]\na = ["10.0.0.1:1", "[fe80::1%eth0]:2"]\nb = "c:3"\n')
    text = ["a=10.0.0.1:1", "b=c:3", "a=[fe80::1%eth0]:2"]
    assert load({"model": str(model)}, {}, table).peers == expected
    assert load({"model": str(model), "peers": text}, {}).peers == expected
    assert load({"model": str(model)}, {"ZC_PEERS": ",".join(text)}).peers == expected


@pytest.mark.parametrize(
    ("flags", "environment", "file", "words"),
    [
        ({}, {}, "n_ctz = 1", ["zc.toml", "`n_ctz`", "did you mean `n_ctx`"]),
        ({}, {}, "n_ctx = '64'", ["zc.toml", "`n_ctx`", "expected a whole number, not '64'"]),
        ({}, {}, "n_ctx = ", ["zc.toml", "not TOML"]),
        ({}, {}, "peers = 5", ["`peers`", "5"]),
        ({}, {}, "[peers]\na = 1", ["`peers`", 'NAME = "HOST:PORT"', "not {'a': 1}"]),
        ({}, {}, "[peers]\na = 'nowhere'", ["peer a", "nowhere"]),
        ({}, {}, "[peers]\na = []", ["peer a", "no address"]),
        ({}, {"ZC_N_CTZ": "1"}, "", ["`ZC_N_CTZ`", "did you mean `ZC_N_CTX`"]),
        ({}, {"ZC_N_CTX": "many"}, "", ["ZC_N_CTX", "environment", "expected a whole number, not 'many'"]),
        ({}, {"ZC_N_CTX": "31"}, "", ["ZC_N_CTX", ">= 32"]),
        ({}, {"ZC_ALLOW_FALLBACK": "maybe"}, "", ["ZC_ALLOW_FALLBACK", "expected true or false, not 'maybe'"]),
        ({"role": "both"}, {}, "", ["--role", "prefill, decode, prefill+decode", "'both'"]),
        ({"queue_s": "nan"}, {}, "", ["--queue-s"]),
        ({"queue_s": "inf"}, {}, "", ["--queue-s"]),
        ({"threads": "-1"}, {}, "", ["--threads", ">= 0"]),
        ({"name": "a b"}, {}, "", ["--name", "1 to 64 letters, digits, dots, dashes, underscores, not 'a b'"]),
        ({"api_keys": ["ann=k1", "ann=k2"]}, {}, "", ["tenant ann has two API keys"]),
        ({"peers": ["a"]}, {}, "", ["--peer", "NAME=HOST:PORT, not 'a'"]),
        ({"peers": ["a=x"]}, {}, "", ["peer a", "x"]),
        ({"listen": "nowhere"}, {}, "", ["listen", "nowhere"]),
        ({"http": "::1:80"}, {}, "", ["http", "[ipv6]"]),
        ({"page_tokens": "100"}, {}, "", ["page_tokens 100", "chunk_tokens 256"]),
        ({"page_tokens": "512"}, {}, "", ["page_tokens 512", "chunk_tokens 256"]),
        ({"chunk_tokens": "512", "n_ctx": "256"}, {}, "", ["chunk_tokens 512 exceeds n_ctx 256", "--chunk-tokens"]),
        ({"model": "/"}, {}, "", ["model / is no file"]),
        ({"model": "/absent.gguf"}, {}, "", ["/absent.gguf", "does not exist"]),
        ({"model": ""}, {}, "", ["--model"]),
        ({"api_key": "ä"}, {}, "", ["API key", "ASCII"]),
        ({"api_key": ""}, {}, "", ["API key", "empty"]),
        ({"api_key": "abc "}, {}, "", ["API key", "space"]),
        ({"peers": ["a b=c:1"]}, {}, "", ["peers", "'a b' is no peer name"]),
        ({}, {}, "[peers]\n'' = 'c:1'", ["peers", "'' is no peer name"]),
    ],
)  # fmt: skip
def test_a_mistake_says_where_it_is_and_what_would_be_right(
    model: Path, tmp_path: Path, flags: dict[str, object], environment: dict[str, str], file: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"model": str(model)} | flags, environment, toml(tmp_path, file))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["n_ctx", "sequences", "kv_tokens", "chunk_tokens", "threads"])
def test_the_engine_takes_what_a_setting_may_be(model: Path, name: str) -> None:
    """Else a mistake is found by a worker, when the daemon runs."""
    (found,) = (setting for setting in config.settings() if setting.name == name)
    (bounds,) = found.type.__metadata__
    for value in (bounds.ge, bounds.le):
        settled = load({"model": str(model), "n_ctx": "65536", "chunk_tokens": "4", name: str(value)}, {})
        assert getattr(settled, name) == value
        engine._check_options(worker_options(settled).llama)


def test_no_model_is_an_error_that_names_all_three_ways(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model.*ZC_MODEL.*TOML"):
        load({}, {})


def test_variables_of_others_are_not_ours(model: Path) -> None:
    assert load({"model": str(model)}, {"PATH": "x", "ZCAT": "y", "ZC_CACHE": "z"})


def test_the_api_key_may_be_in_a_file_and_never_shows(model: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("s3cret\nann key-of-ann\n")
    flags = {"model": str(model), "api_key_file": str(key_file)}
    settled = load(flags, {})
    assert settled.api_key == "s3cret"
    assert settled.tenant_keys() == {b"s3cret": "", b"key-of-ann": "ann"}
    assert "key-of-ann" not in repr(settled)
    assert "s3cret" not in repr(settled) and "***" in repr(settled)
    assert "s3cret" not in str(settled)
    with pytest.raises(ConfigError, match="both"):
        load(flags | {"api_key": "x"}, {})
    with pytest.raises(ConfigError, match="tenant ann has two API keys"):
        load(flags | {"api_keys": ["ann=other"]}, {})
    for twice, words in (("ann k1\nann k2\n", "tenant ann has two"), ("k1\nk2\n", "two lines with a key alone")):
        key_file.write_text(twice)
        with pytest.raises(ConfigError, match=words):
            load(flags, {})
    key_file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        load(flags, {})
    key_file.write_text("".join(f"tenant-{n} key-{n}\n" for n in range(10_000)))  # cut, the last key would be another
    with pytest.raises(ConfigError, match="larger than 65536 bytes"):
        load(flags, {})
    with pytest.raises(ConfigError, match="cannot read"):
        load(flags | {"api_key_file": str(tmp_path / "absent")}, {})


def test_a_wrong_api_key_is_not_quoted_in_its_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"model": str(model)}, {}, toml(tmp_path, "api_key = 12345678"))
    assert "12345678" not in str(caught.value)


def test_defaults_serve_loopback_only_and_pass_their_own_checks() -> None:
    defaults = DaemonConfig()
    assert defaults.listen.startswith("127.") and defaults.http.startswith("127.")
    for setting in config.settings():
        if setting.default is not None and setting.name not in ("keys", "peers"):
            msgspec.convert(setting.default, setting.type)
        assert setting.text.endswith("."), setting.name


def test_the_documentation_is_current() -> None:
    """`python -m zerocopy.cli.reference > docs/configuration.md` makes it so."""
    written = Path(__file__).parent.parent / "docs" / "configuration.md"
    assert written.read_text() == reference.reference()
