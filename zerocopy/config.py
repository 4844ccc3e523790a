"""Every setting of a daemon, in one struct: the single source of `--help`, the TOML reference and the docs.

Values come from four places, later ones win: defaults, a TOML file, `ZC_*` environment variables, flags. Nothing is
guessed: an unknown key is an error that names the nearest known one, and every error says where the value came from.
Owns no sockets and no engine; the only files it reads are the TOML file and the API key file.
"""

from __future__ import annotations

import difflib
import socket
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_type_hints

import msgspec

from transport.address import parse
from transport.keys import check_name
from transport.link import LinkError
from transport.quic_choice import split_scheme

Role = Literal["prefill", "decode", "prefill+decode"]
Placement = Literal["local", "disaggregated"]
KvType = Literal["f16", "bf16", "f32", "q8_0"]
LogLevel = Literal["debug", "info", "warning", "error"]

CONFIG_DIR: Final = "~/.config/zc-handoff"
CONFIG_FILE: Final = f"{CONFIG_DIR}/config.toml"
ENV_PREFIX: Final = "ZC_"
# Read elsewhere, so not settings, and not typing errors either.
OTHER_VARIABLES: Final = frozenset({"ZC_CACHE", "ZC_CONFIG"})
MAX_API_KEY_BYTES: Final = 1 << 16  # of the whole file
MAX_TENANT: Final = 64
# What msgspec calls them, and what people write.
_KINDS: Final = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
MAX_CONTEXT: Final = 1 << 22  # tokens; the engine's adapter takes no more


class ConfigError(Exception):
    """A setting is wrong. The message names it, where it came from, and what would be right."""

    reason = "config"


def _setting(group: str, text: str, **meta: Any) -> msgspec.Meta:
    """`text` is the one description of the setting; `flag` and `metavar` override what its name would give."""
    extra = {"group": group} | {key: meta.pop(key) for key in ("flag", "metavar", "default") if key in meta}
    return msgspec.Meta(description=text, extra=extra, **meta)


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of `zc-handoff daemon`. Frozen: a daemon is reconfigured by restarting it."""

    name: Annotated[
        str,
        _setting(
            "Host",
            "Name of this host in logs, metrics and /v1/status.",
            metavar="NAME",
            default="the host name",
            min_length=1,
            max_length=64,
            pattern=r"^[A-Za-z0-9._-]+$",
        ),
    ] = msgspec.field(default_factory=lambda: socket.gethostname())
    role: Annotated[
        Role,
        _setting("Host", "What this host does for its peers. A decode host still prefills its own local requests."),
    ] = "prefill+decode"
    model: Annotated[
        Path | None, _setting("Host", "GGUF file to load. Required; the same weights on every host.", metavar="FILE")
    ] = None

    listen: Annotated[
        str,
        _setting(
            "Network",
            "Where peers connect to. Loopback unless set: use 0.0.0.0:7600 or the address of one interface.",
            metavar="HOST:PORT",
        ),
    ] = "127.0.0.1:7600"
    advertise: Annotated[
        str | None,
        _setting(
            "Network",
            "Address that peers are told, where it differs from --listen: NAT, containers, several interfaces.",
            metavar="HOST:PORT",
            default="where it listens, or every interface's",
        ),
    ] = None
    http: Annotated[
        str,
        _setting(
            "Network",
            "Where the OpenAI-compatible API listens. Set an API key before you open it.",
            metavar="HOST:PORT",
        ),
    ] = "127.0.0.1:8080"
    peers: Annotated[
        dict[str, tuple[str, ...]],
        _setting(
            "Network",
            "A peer to connect to, by the name its key is trusted under; quic://HOST:PORT for QUIC. Repeat for more "
            "peers or addresses.",
            flag="--peer",
            metavar="NAME=HOST:PORT",
            default="none",
        ),
    ] = {}
    keys: Annotated[
        Path,
        _setting(
            "Network", "Directory of this host's key and the keys it trusts (see `zc-handoff keys`).", metavar="DIR"
        ),
    ] = Path(f"{CONFIG_DIR}/keys")
    streams: Annotated[
        int,
        _setting(
            "Network",
            "Encrypted TCP connections per peer for state; 0 lets cores and the measured path decide.",
            metavar="N",
            default="chosen; `zc-handoff status` says why",
            ge=0,
            le=16,
        ),
    ] = 0

    n_ctx: Annotated[
        int, _setting("Engine", "Longest prompt plus answer, in tokens.", metavar="N", ge=32, le=MAX_CONTEXT)
    ] = 4096
    sequences: Annotated[
        int,
        _setting(
            "Engine", "Requests the engine works on at once, for each role of the host.", metavar="N", ge=1, le=252
        ),
    ] = 4
    kv_tokens: Annotated[
        int,
        _setting(
            "Engine",
            "Tokens of context that all requests of a role at once may need; memory is reserved for them. At least "
            "n_ctx; a request that does not fit now waits.",
            metavar="N",
            default="twice n_ctx",
            ge=0,
            le=MAX_CONTEXT,
        ),
    ] = 0
    chunk_tokens: Annotated[
        int,
        _setting(
            "Engine",
            "Prompt tokens per engine call. Equal on both hosts for bit-equal results.",
            metavar="N",
            ge=4,
            le=65536,
        ),
    ] = 256
    page_tokens: Annotated[
        int,
        _setting(
            "Engine",
            "Most tokens per exported page; divides chunk_tokens. 0: as many as make 8 MiB, at most a chunk, "
            "and up to a quarter of the ring where several wait for it. Less where a ring or a sliding window takes "
            "less; `zc-handoff status` shows it.",
            metavar="N",
            ge=0,
            le=65536,
        ),
    ] = 0
    kv_type: Annotated[KvType, _setting("Engine", "Number type of the KV cache. Equal on both hosts.")] = "f16"
    flash_attention: Annotated[Literal["on", "off"], _setting("Engine", "Flash attention. Equal on both hosts.")] = "on"
    batch_invariant: Annotated[
        bool,
        _setting(
            "Engine",
            "Compute every sequence as if it were alone: no bit of an answer depends on what else is served. "
            "Long prompts take longer. Equal on both hosts for bit-equal results.",
        ),
    ] = False
    threads: Annotated[
        int,
        _setting("Engine", "Engine threads; 0: one a physical core. Equal on both hosts.", metavar="N", ge=0, le=1024),
    ] = 0
    cores: Annotated[
        Literal["own", "shared"],
        _setting(
            "Engine",
            "Whether others compute on this machine's cores, too, a second daemon say: engine threads that wait for "
            "each other then sleep sooner. Two daemons that both take the cores for their own are a third as fast.",
        ),
    ] = "own"
    engine_call_s: Annotated[
        float,
        _setting(
            "Engine",
            "Longest engine call, a chunk of a prompt. A worker that is silent for longer hangs: it is started again.",
            metavar="SECONDS",
            gt=0,
            le=3600,
        ),
    ] = 30.0
    mtp: Annotated[
        Literal["auto", "off"],
        _setting(
            "Engine", "Keep the model's multi-token-prediction state and hand it over; auto: if the model has a head."
        ),
    ] = "auto"

    ring_mib: Annotated[
        int, _setting("Memory", "Size of one shared-memory ring in MiB.", metavar="MIB", ge=1, le=65536)
    ] = 64
    rings: Annotated[
        int,
        _setting("Memory", "Rings in the pool: the handoffs that can be in flight at once.", metavar="N", ge=1, le=256),
    ] = 4

    placement: Annotated[
        Placement,
        _setting("Requests", "Where prompts are prefilled unless a request says otherwise (header x-zc-placement)."),
    ] = "local"
    allow_fallback: Annotated[
        bool,
        _setting(
            "Requests",
            "Prefill here when no peer can, and say so in the x-zc-fallback header; otherwise answer an error.",
        ),
    ] = True
    probe: Annotated[
        bool,
        _setting(
            "Requests",
            "Check each handoff by evaluating the last prompt token on both hosts before it commits. Costs the "
            "prefiller one token.",
        ),
    ] = True
    allow_proofs: Annotated[
        bool,
        _setting("Requests", "Answer x-zc-proof with keyed digests of state and logits. For tests: costs a re-export."),
    ] = False
    queue: Annotated[
        int, _setting("Requests", "Most requests that may wait for the engine.", metavar="N", ge=0, le=65536)
    ] = 256
    tenant_requests: Annotated[
        int,
        _setting(
            "Requests",
            "Most requests, waiting and running, of one API key, or of all who need none.",
            metavar="N",
            ge=1,
            le=65536,
        ),
    ] = 64
    queue_s: Annotated[
        float, _setting("Requests", "Longest wait for the engine or a prefiller.", metavar="SECONDS", gt=0, le=86400)
    ] = 30.0
    transfer_s: Annotated[
        float,
        _setting(
            "Requests", "Longest transfer of one handoff, from grant to commit.", metavar="SECONDS", gt=0, le=86400
        ),
    ] = 120.0
    request_s: Annotated[
        float, _setting("Requests", "Longest request, from arrival to last token.", metavar="SECONDS", gt=0, le=86400)
    ] = 600.0
    drain_s: Annotated[
        float,
        _setting(
            "Requests",
            "After SIGTERM: how long running requests may take to end. A second signal ends them at once.",
            metavar="SECONDS",
            ge=0,
            le=86400,
        ),
    ] = 25.0

    api_key: Annotated[
        str | None,
        _setting(
            "Security",
            "Key that HTTP clients must send as `Authorization: Bearer KEY`. Prefer the file: a flag shows in ps.",
            metavar="KEY",
            default="no key",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, _setting("Security", "File with a line KEY, and lines TENANT KEY.", metavar="FILE", default="none")
    ] = None
    api_keys: Annotated[
        dict[str, str],
        _setting(
            "Security",
            "More keys, each of a tenant of its own, whose requests are counted apart. Prefer the file or TOML.",
            flag="--tenant-key",
            metavar="TENANT=KEY",
            default="none",
        ),
    ] = {}

    log_level: Annotated[LogLevel, _setting("Logs", "Least severe level that is written to stderr.")] = "info"
    log_format: Annotated[
        Literal["text", "json"], _setting("Logs", "One readable line, or one JSON object, per event.")
    ] = "text"

    def __repr__(self) -> str:
        """Without the API key, so that no log or traceback can show it."""
        values = {f: getattr(self, f) for f in self.__struct_fields__} | {
            "api_key": "***" if self.api_key else None,
            "api_keys": dict.fromkeys(self.api_keys, "***"),
        }
        return f"DaemonConfig({', '.join(f'{k}={v!r}' for k, v in values.items())})"

    def tenant_keys(self) -> dict[bytes, str]:
        """Every key and the tenant it stands for; the one without a name is tenant "". No keys: no check."""
        keys = {key.encode(): tenant for tenant, key in self.api_keys.items()}
        return keys | ({self.api_key.encode(): ""} if self.api_key else {})


class Setting(msgspec.Struct, frozen=True):
    """One field of `DaemonConfig` as flags, environment, TOML and docs see it."""

    name: str
    group: str
    text: str
    flag: str
    env: str
    type: Any
    metavar: str | None
    default: Any
    default_text: str | None


def settings() -> list[Setting]:
    """All settings, in the order of the struct."""
    hints = get_type_hints(DaemonConfig, include_extras=True)
    return [_describe(field, hints[field.name]) for field in msgspec.structs.fields(DaemonConfig)]


def _describe(field: msgspec.structs.FieldInfo, hint: Any) -> Setting:
    meta: msgspec.Meta = hint.__metadata__[0]
    extra = meta.extra or {}
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return Setting(
        name=field.name,
        group=extra["group"],
        text=meta.description or "",
        flag=extra.get("flag", "--" + field.name.replace("_", "-")),
        env=ENV_PREFIX + field.name.upper(),
        type=hint,
        metavar=extra.get("metavar"),
        default=default,
        default_text=extra.get("default"),
    )


def load(flags: Mapping[str, object], environ: Mapping[str, str], config_file: Path | None = None) -> DaemonConfig:
    """Merge all four sources and check the result. `flags` holds only what was given on the command line."""
    known = {s.name: s for s in settings()}
    values: dict[str, object] = {}
    for where, raw in _sources(known, flags, environ, config_file):
        for name, value in raw.items():
            values[name] = _convert(known[name], value, where)
    config = DaemonConfig(**values)  # type: ignore[arg-type]  # each value was converted to its field's type
    return _complete(config)


def _sources(
    known: Mapping[str, Setting], flags: Mapping[str, object], environ: Mapping[str, str], config_file: Path | None
) -> Iterable[tuple[str, dict[str, object]]]:
    path = _config_path(environ, config_file)
    if path is not None:
        yield str(path), _read_toml(path, known)
    yield "environment", _read_environment(environ, known)
    yield "command line", dict(flags)


def _config_path(environ: Mapping[str, str], config_file: Path | None) -> Path | None:
    """A file that was named must exist; the default one need not."""
    named = config_file or (Path(environ["ZC_CONFIG"]) if environ.get("ZC_CONFIG") else None)
    if named is not None:
        return named.expanduser()
    default = Path(CONFIG_FILE).expanduser()
    return default if default.is_file() else None


def _read_toml(path: Path, known: Mapping[str, Setting]) -> dict[str, object]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {_why(error)}: give another file with --config FILE") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for name in values:
        if name not in known:
            raise ConfigError(f"{path} has an unknown key `{name}`{nearest(name, known)}")
    return values


def _read_environment(environ: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, object]:
    by_env = {s.env: s for s in known.values()}
    values: dict[str, object] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in by_env:
            raise ConfigError(f"unknown environment variable `{variable}`{nearest(variable, by_env)}")
        values[by_env[variable].name] = text
    return values


def _convert(setting: Setting, value: object, where: str) -> object:
    """One raw value to its field's type. Text from the environment and flags is parsed; TOML must have the type."""
    source = f"{setting.env} in the environment" if where == "environment" else f"`{setting.name}` in {where}"
    source = f"{setting.flag} on the command line" if where == "command line" else source
    strict = where not in ("environment", "command line")
    try:
        parsed = value
        if setting.name == "peers":
            parsed = _peers(value)
        if setting.name == "api_keys":
            parsed = _tenant_keys(value)
        return msgspec.convert(parsed, setting.type, strict=strict, dec_hook=_path)
    except msgspec.ValidationError as error:
        given = value if isinstance(value, list | tuple) else [value]  # flags that may be repeated come as a list
        shown = "" if setting.name in ("api_key", "api_keys") else f", not {', '.join(map(repr, given))}"
        raise ConfigError(f"{source}: expected {_wanted(setting, error)}{shown}") from error


def _wanted(setting: Setting, error: msgspec.ValidationError) -> str:
    choices = literal_choices(setting)
    if choices:
        return f"one of {', '.join(choices)}"
    if setting.name == "name":
        return "1 to 64 letters, digits, dots, dashes, underscores"
    if setting.name == "peers" and not str(error).startswith("Expected NAME="):
        return 'NAME = "HOST:PORT" or a list of such addresses for each peer'
    words = str(error).split(" - at ")[0].split(", got ")[0].removeprefix("Expected ")
    for kind, said in _KINDS.items():
        words = words.replace(f"`{kind}`", said)
    return words


def literal_choices(setting: Setting) -> tuple[str, ...]:
    """The allowed words of a setting that has a fixed list of them, else nothing."""
    inner = setting.type.__origin__
    return tuple(inner.__args__) if getattr(inner, "__origin__", None) is Literal else ()


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str) and value:
        return Path(value).expanduser()
    raise ValueError("Expected a path")


def _peers(value: object) -> dict[str, list[str]]:
    """TOML: a table of an address or a list of them."""
    if isinstance(value, dict):
        return {name: [at] if isinstance(at, str) else at for name, at in value.items()}
    peers: dict[str, list[str]] = {}
    for name, address in _named(value, "NAME = ADDRESS", "NAME=HOST:PORT"):
        peers.setdefault(name, []).append(address)
    return peers


def _tenant_keys(value: object) -> dict[str, str]:
    """TOML: a table."""
    if isinstance(value, dict):
        return value
    keys: dict[str, str] = {}
    for tenant, key in _named(value, "TENANT = KEY", "TENANT=KEY"):
        _add_key(keys, tenant, key)
    return keys


def _named(value: object, table: str, form: str) -> list[tuple[str, str]]:
    """NAME=VALUE, many separated by commas or repeated flags."""
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise msgspec.ValidationError(f"Expected a table of {table}")
    parts = [str(text).strip().partition("=") for text in texts]
    if not all(map(all, parts)):
        raise msgspec.ValidationError(f"Expected {form}")
    return [(name, given) for name, _, given in parts]


def _add_key(keys: dict[str, str], tenant: str, key: str) -> None:
    """A second one would silently lock out whoever has the first."""
    if tenant in keys:
        raise ConfigError(f"tenant {tenant} has two API keys: give it one, or the second a name of its own")
    keys[tenant] = key


def _complete(config: DaemonConfig) -> DaemonConfig:
    """Checks that need more than one field or the file system, and the API key's file."""
    if config.model is None:
        raise ConfigError('no model: give --model FILE, set ZC_MODEL, or write model = "FILE" in the TOML file')
    if not config.model.is_file():
        what = "is no file" if config.model.exists() else "does not exist"
        raise ConfigError(f"model {config.model} {what}: `zc-handoff model make` writes tiny ones to try")
    addresses = [("listen", config.listen), ("http", config.http)]
    addresses += [("advertise", config.advertise)] if config.advertise else []
    for name, many in config.peers.items():
        _check("peers", check_name, name)
        if not many:
            raise ConfigError(f'peer {name} has no address: write {name} = "HOST:PORT" under [peers]')
        addresses += [(f"peer {name}", split_scheme(address)[1]) for address in many]
    for name, address in addresses:
        _check(name, parse, address)
    if config.page_tokens and config.chunk_tokens % config.page_tokens:
        raise ConfigError(
            f"page_tokens {config.page_tokens} does not divide chunk_tokens {config.chunk_tokens}: "
            f"set --page-tokens to {config.chunk_tokens} or a divisor of it"
        )
    if config.chunk_tokens > config.n_ctx:
        raise ConfigError(
            f"chunk_tokens {config.chunk_tokens} exceeds n_ctx {config.n_ctx}: lower --chunk-tokens or raise --n-ctx"
        )
    if config.kv_tokens and config.kv_tokens < config.n_ctx:
        raise ConfigError(
            f"kv_tokens {config.kv_tokens} is less than n_ctx {config.n_ctx}: one request could need it all"
        )
    return msgspec.structs.replace(_with_keys(config), keys=config.keys.expanduser())


def _with_keys(config: DaemonConfig) -> DaemonConfig:
    """The keys of the file beside those that were given, all fit for an HTTP header, no two the same."""
    if config.api_key_file is not None:
        if config.api_key is not None:
            raise ConfigError("both api_key and api_key_file are set: keep one of them")
        plain, tenants = _read_keys(config.api_key_file)
        all_keys = dict(config.api_keys)
        for tenant, key in tenants.items():
            _add_key(all_keys, tenant, key)
        config = msgspec.structs.replace(config, api_key=plain, api_keys=all_keys)
    keys = [*config.api_keys.values(), *([] if config.api_key is None else [config.api_key])]
    if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in keys):
        raise ConfigError("the API key has to be printable ASCII, not empty, no space around it: HTTP carries no other")
    if len(set(keys)) < len(keys):
        raise ConfigError("two tenants have the same API key: give each its own")
    if any(not 1 <= len(tenant) <= MAX_TENANT for tenant in config.api_keys):
        raise ConfigError(f"a tenant's name has to have 1 to {MAX_TENANT} characters")
    return config


def _check(where: str, check: Callable[[str], object], text: str) -> None:
    try:
        check(text)
    except LinkError as error:
        raise ConfigError(f"{where}: {error}") from error


def _read_keys(path: Path) -> tuple[str | None, dict[str, str]]:
    """(the key without a name, the keys of tenants)"""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_API_KEY_BYTES + 1)
        lines = data.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API key in {path}: {_why(error)}") from error
    if len(data) > MAX_API_KEY_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_API_KEY_BYTES} bytes: keep keys only, no others' files")
    plain: str | None = None
    tenants: dict[str, str] = {}
    for line in filter(None, map(str.strip, lines)):
        tenant, _, key = line.partition(" ")
        if key:
            _add_key(tenants, tenant, key.strip())
        elif plain is None:
            plain = line
        else:
            raise ConfigError(f"{path} has two lines with a key alone: give the second a tenant's name, TENANT KEY")
    if plain is None and not tenants:
        raise ConfigError(f"{path} is empty: write the API key there")
    return plain, tenants


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"


def nearest(name: str, known: Iterable[str]) -> str:
    """`: did you mean ...?`, or nothing when no known name is close."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean `{match[0]}`?" if match else ""


def default_text(setting: Setting) -> str:
    """The default as people write it."""
    if setting.default_text is not None:
        return setting.default_text
    if setting.name == "model":
        return "none, required"
    if isinstance(setting.default, bool):
        return "true" if setting.default else "false"
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)
