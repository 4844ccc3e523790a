"""`keys`: two hosts come to trust each other with it, and its mistakes are one line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from transport.keys import KeyStore
from zerocopy.cli import main


class Hosts:
    """Runs `keys` for two hosts with directories of their own."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self._capsys = root, capsys

    def run(self, host: str, *argv: str) -> tuple[int, str, str]:
        code = main.run(["keys", *argv, "--keys", str(self.root / host)])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def json(self, host: str, *argv: str) -> Any:
        code, out, err = self.run(host, *argv, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)


@pytest.fixture
def hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setenv("COLUMNS", "120")
    return Hosts(tmp_path, capsys)


def test_two_hosts_trust_each_other_with_three_commands_each(hosts: Hosts) -> None:
    for host in ("a", "b"):
        assert hosts.run(host, "new", host)[0] == 0
        (hosts.root / f"{host}.pem").write_text(hosts.run(host, "show")[1])
    for host, other in (("a", "b"), ("b", "a")):
        assert hosts.run(host, "trust", other, str(hosts.root / f"{other}.pem"))[0] == 0
    assert hosts.json("a", "list")["trusted"] == {"b": hosts.json("b", "show")["fingerprint"]}
    assert hosts.json("b", "list")["trusted"] == {"a": hosts.json("a", "show")["fingerprint"]}
    assert KeyStore(hosts.root / "a").client_context("b")


def test_new_says_what_to_do_next_and_never_overwrites(hosts: Hosts) -> None:
    code, out, _ = hosts.run("a", "new", "alpha")
    assert code == 0
    assert "keys show" in out and "zc-handoff keys trust alpha alpha.pem" in out
    before = (hosts.root / "a" / "identity.pem").read_bytes()
    code, out, err = hosts.run("a", "new", "alpha")
    assert (code, out) == (1, "") and "already exists" in err
    assert (hosts.root / "a" / "identity.pem").read_bytes() == before


def test_no_command_prints_the_private_key(hosts: Hosts) -> None:
    hosts.run("a", "new", "alpha")
    for argv in (["show"], ["show", "--json"], ["list"], ["list", "--json"]):
        assert "PRIVATE" not in hosts.run("a", *argv)[1]


def test_a_certificate_can_come_from_stdin(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.run("a", "new", "alpha")
    hosts.run("b", "new", "beta")
    pem = hosts.run("b", "show")[1]
    stdin = io.TextIOWrapper(io.BytesIO(pem.encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert hosts.run("a", "trust", "beta", "-")[0] == 0
    assert list(hosts.json("a", "list")["trusted"]) == ["beta"]


def test_forgetting_ends_trust(hosts: Hosts) -> None:
    hosts.run("a", "new", "alpha")
    hosts.run("b", "new", "beta")
    file = hosts.root / "b.pem"
    file.write_text(hosts.run("b", "show")[1])
    hosts.run("a", "trust", "beta", str(file))
    assert hosts.run("a", "forget", "beta")[0] == 0
    assert hosts.json("a", "list")["trusted"] == {}
    assert "nobody is trusted" in hosts.run("a", "list")[1]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["show"], 1, ["keys new"]),
        (["forget", "beta"], 1, ["beta"]),
        (["trust", "beta", "/absent.pem"], 2, ["/absent.pem", "keys show"]),
        (["trust", "beta", "/"], 2, ["/"]),
        (["trust", "beta", "/dev/null"], 1, ["certificate"]),
        (["trust", "../beta", "/dev/null"], 1, ["../beta"]),
        (["new", "a b"], 1, ["'a b'"]),
    ],
)
def test_a_mistake_is_one_line_with_the_next_step(hosts: Hosts, argv: list[str], code: int, words: list[str]) -> None:
    got, out, err = hosts.run("a", *argv)
    assert (got, out) == (code, "")
    assert err.count("\n") == 1 and all(word in err for word in words), err


def test_the_directory_comes_from_the_environment_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZC_KEYS", str(tmp_path / "k"))
    assert main.run(["keys", "new", "alpha"]) == 0
    assert KeyStore(tmp_path / "k").name() == "alpha"
