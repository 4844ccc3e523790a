"""The page ledger: what of a state has come, exactly once, and whether that is what the manifest says (H8, S1-S7).

Both ends keep one: the sink checks every page against it before any memory is claimed, the source proves with it
that nothing was left out. The list of what must come is derived from this host's own schema, never from the peer.
Owns addresses and checksums, no payloads. Bounds: `MAX_PAGES` entries of 24 bytes, at most `sources` sources.

A page is *claimed* when its header has been accepted and *landed* when its payload has been verified. Every refusal
is a RemoteProtocolError whose message names the component.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Final

from zerocopy.handoff.components import Codec, Component, ComponentSpec, PageHeader, StateSchema
from zerocopy.handoff.coverage import Coverage, Rectangle
from zerocopy.handoff.errors import LocalProtocolError, RemoteProtocolError
from zerocopy.handoff.messages import MAX_PAGES, ComponentManifest, Manifest

_BOUND: Final = ("handoff", "identity", "epoch", "schema version", "position planes", "codec")
_ENTRY: Final = struct.Struct(">HHIIQ")  # big endian: byte order of entries is address order


class Binding:
    """What every page of one handoff must carry."""

    def __init__(self, handoff_id: bytes, identity: bytes, epoch: int) -> None:
        self.handoff_id = handoff_id
        self.identity = identity
        self.epoch = epoch


class _Tally:
    """What one source has sent of one component."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        self.nbytes = 0
        self.closed = False

    def digest(self) -> bytes:
        return hashlib.blake2b(b"".join(sorted(self.entries)), digest_size=16).digest()


class _Part:
    """One component's rectangle."""

    def __init__(self, spec: ComponentSpec, tokens: int) -> None:
        self.spec = spec
        self.claimed = Coverage(spec.layers, tokens)
        self.landed = Coverage(spec.layers, tokens)
        self.tallies: dict[int, _Tally] = {}


class Ledger:
    """`required` components of `schema`, each over [0, its layers) x [0, tokens)."""

    def __init__(
        self, schema: StateSchema, required: Iterable[Component], tokens: int, binding: Binding, sources: int = 1
    ) -> None:
        self._schema = schema
        self._tokens = tokens
        self._bound = (
            binding.handoff_id, binding.identity, binding.epoch, schema.version, schema.position_planes, Codec.NONE
        )  # fmt: skip
        self._next = [0] * sources
        self._parts = {c: _Part(_spec(schema, c), tokens) for c in required}
        self.pages = 0

    def next_sequence(self, source: int = 0) -> int:
        return self._next[source]

    def claim(self, header: PageHeader) -> None:
        """Take note that this page is coming, or refuse it. A refused page leaves no trace."""
        self._check_binding(header)
        part = self._check_address(header)
        self._check_order(header, part)
        if self.pages >= MAX_PAGES:
            raise RemoteProtocolError("page-count", f"{header.address}: more than {MAX_PAGES} pages in one handoff")
        if hit := part.claimed.overlap(header.layers, header.tokens):
            raise RemoteProtocolError("page-overlap", f"{header.address}: {_where(hit)} came already")
        part.claimed.add(header.layers, header.tokens)
        part.tallies.setdefault(header.source, _Tally()).closed = header.final
        self._next[header.source] += 1
        self.pages += 1

    def land(self, header: PageHeader) -> None:
        """The claimed page's payload has been verified."""
        part = self._parts[header.component]
        part.landed.add(header.layers, header.tokens)
        tally = part.tallies[header.source]
        tally.entries.append(_ENTRY.pack(*header.layers, *header.tokens, header.checksum))
        tally.nbytes += header.payload_bytes

    def landed(self, component: Component) -> bool:
        """Every page of this component has landed. KeyError for one that is not required."""
        return self._parts[component].landed.complete

    def landed_pages(self, source: int = 0) -> int:
        return sum(len(p.tallies[source].entries) for p in self._parts.values() if source in p.tallies)

    def gaps(self, component: Component) -> list[Rectangle]:
        """What of a required component has not landed yet, by layers then tokens."""
        return self._parts[component].landed.gaps()

    def check_complete(self) -> None:
        """Raises RemoteProtocolError naming the first component that is not whole, and its first gap."""
        for component, part in self._parts.items():
            if gaps := self.gaps(component):
                raise RemoteProtocolError("state-incomplete", f"{component.label} lacks {_where(gaps[0])}")
            if not any(tally.closed for tally in part.tallies.values()):
                raise RemoteProtocolError("state-incomplete", f"{component.label} has no page marked final")

    def summary(self, source: int = 0) -> tuple[ComponentManifest, ...]:
        """What `source` has sent, as its manifest must state it."""
        return tuple(
            ComponentManifest(
                component=component,
                layers=(0, part.spec.layers),
                tokens=(0, self._tokens),
                pages=len(tally.entries),
                nbytes=tally.nbytes,
                digest=tally.digest(),
            )
            for component, part in self._parts.items()
            if (tally := part.tallies.get(source)) is not None
        )

    def check_manifest(self, manifest: Manifest) -> None:
        """Compare the manifest with what landed from its source. Raises RemoteProtocolError naming the component."""
        stated = _by_component(manifest)
        ours = {entry.component: entry for entry in self.summary(manifest.source)}
        for component in sorted(ours.keys() | stated.keys()):
            mine, theirs = ours.get(component), stated.get(component)
            if mine is None or theirs is None:
                absent, present = ("here", "in the manifest") if mine is None else ("in the manifest", "here")
                raise RemoteProtocolError("manifest-mismatch", f"{component.label} is {present} but not {absent}")
            _compare(mine, theirs)

    def _check_binding(self, header: PageHeader) -> None:
        found = (
            header.handoff_id,
            header.identity,
            header.epoch,
            header.schema_version,
            header.position_planes,
            header.codec,
        )
        if found == self._bound:  # once per page: names and hex are for the one that is wrong
            return
        for name, theirs, mine in zip(_BOUND, found, self._bound, strict=True):
            if theirs != mine:
                a, b = (value.hex() if isinstance(value, bytes) else getattr(value, "name", value)
                        for value in (theirs, mine))  # fmt: skip
                raise RemoteProtocolError("page-foreign", f"{header.address}: {name} is {a}, expected {b}")

    def _check_address(self, header: PageHeader) -> _Part:
        part = self._parts.get(header.component)
        if part is None:
            raise RemoteProtocolError("page-unexpected", f"{header.component.label} is not part of this handoff")
        spec, (t0, t1) = part.spec, header.tokens
        if not (0 <= header.layers[0] < header.layers[1] <= spec.layers and 0 <= t0 < t1 <= self._tokens):
            raise RemoteProtocolError(
                "page-range", f"{header.address}: outside layers [0,{spec.layers}) tokens [0,{self._tokens})"
            )
        if not spec.per_token and (t0, t1) != (0, self._tokens):
            raise RemoteProtocolError(
                "page-range", f"{header.address}: a snapshot is of all {self._tokens} tokens, not of a part"
            )
        if spec.per_token and t1 - t0 > spec.max_page_tokens:
            raise RemoteProtocolError(
                "page-range",
                f"{header.address}: {t1 - t0} tokens in one page, the schema allows {spec.max_page_tokens}",
            )
        expected = spec.page_bytes(header.layers, header.tokens)
        if header.payload_bytes != expected:
            raise RemoteProtocolError(
                "page-size", f"{header.address}: {header.payload_bytes} bytes, the schema says {expected}"
            )
        return part

    def _check_order(self, header: PageHeader, part: _Part) -> None:
        if header.source >= len(self._next):
            raise RemoteProtocolError(
                "page-foreign", f"{header.address}: source {header.source}, this handoff has {len(self._next)}"
            )
        expected = self._next[header.source]
        if header.sequence != expected:
            kind = "duplicate or reordered" if header.sequence < expected else "a page before it is missing"
            raise RemoteProtocolError(
                "page-sequence", f"{header.address}: page number {header.sequence}, expected {expected}: {kind}"
            )
        tally = part.tallies.get(header.source)
        if tally is not None and tally.closed:
            raise RemoteProtocolError("page-after-final", f"{header.address}: came after the component's final page")


def required_components(schema: StateSchema, probe: bool) -> tuple[Component, ...]:
    """What must travel: all of the schema, the continuation probe only if it is asked for."""
    return tuple(s.component for s in schema.components if probe or s.component is not Component.PROBE)


def _spec(schema: StateSchema, component: Component) -> ComponentSpec:
    spec = schema.spec(component)
    if spec is None or spec.layers == 0:
        raise LocalProtocolError("schema", f"schema of family {schema.family} says nothing of {component.label}")
    return spec


def _where(part: Rectangle) -> str:
    return f"layers [{part.layers[0]},{part.layers[1]}) tokens [{part.tokens[0]},{part.tokens[1]})"


def _by_component(manifest: Manifest) -> dict[Component, ComponentManifest]:
    stated = {entry.component: entry for entry in manifest.components}
    if len(stated) != len(manifest.components):
        raise RemoteProtocolError("manifest-mismatch", "manifest lists a component twice")
    return stated


def _compare(mine: ComponentManifest, theirs: ComponentManifest) -> None:
    for field in ("layers", "tokens", "pages", "nbytes"):
        here, stated = getattr(mine, field), getattr(theirs, field)
        if here != stated:
            raise RemoteProtocolError(
                "manifest-mismatch", f"{mine.component.label}: manifest says {field} {stated}, landed were {here}"
            )
    if mine.digest != theirs.digest:
        raise RemoteProtocolError("manifest-mismatch", f"{mine.component.label}: digest over its pages differs")
