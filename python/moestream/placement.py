"""Where each tensor goes: the rules a caller may give, the plan they make, and what really happened.

Rules are tried in this order, and the first that matches a tensor wins: the caller's overrides in the given order,
expert_layers, the first N blocks (n_cpu_moe, cpu_moe_layers), cpu_moe, streaming, dense weights. A pattern is an
ECMAScript regular expression that is searched in the tensor's name, by the engine that will run it in the load.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moestream import _native_api as native
from moestream import checks, logs
from moestream._calls import uninterrupted
from moestream.errors import InvalidError
from moestream.stream import Stream, as_stream

Overrides = str | Mapping[str, str] | Iterable[tuple[str, str]] | None
ExpertLayers = Mapping[str, Iterable[int]] | None

# What upstream's --cpu-moe means by routed experts: weights, biases and scales, split, fused and chunked layouts.
_ROUTED_EXPERTS = r"ffn_(up|down|gate|gate_up)_(ch|)exps"


def parse_overrides(overrides: Overrides) -> list[tuple[str, str]]:
    """Rules as (pattern, place) pairs.

    A string is "pattern=PLACE,pattern=PLACE": commas inside brackets, braces or parentheses belong to the pattern,
    and so does every "=" but the last. Spaces around a rule and a comma at the end are dropped.

    Raises:
        ValueError: a rule without "=", an empty pattern or place, or a pair that is not two strings; the rule is named.
    """
    if overrides is None:
        return []
    if isinstance(overrides, str):
        return [_parse_rule(rule) for rule in split_rules(overrides)]
    if not isinstance(overrides, Iterable):
        raise ValueError(f"overrides was {overrides!r}; it is pairs (pattern, place), a dict, or one text")
    pairs: Iterable[Any] = overrides.items() if isinstance(overrides, Mapping) else overrides
    rules: list[tuple[str, str]] = []
    for pair in pairs:
        if isinstance(pair, (str, bytes)) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(f"an override was {pair!r}; it is a pair (pattern, place)")
        pattern, place = pair
        if not isinstance(pattern, str) or not isinstance(place, str) or not pattern or not place:
            raise ValueError(f"an override was {pair!r}; pattern and place are texts that are not empty")
        if "\0" in pattern or "\0" in place:
            raise ValueError(f"an override was {pair!r}; it has a zero byte in it")
        rules.append((pattern, place))
    return rules


def split_rules(text: str) -> list[str]:
    """Cuts at the commas that are outside every bracket, brace, parenthesis and character class."""
    rules, start, depth, in_class, escaped = [], 0, 0, False, False
    for i, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "({":
            depth += 1
        elif char in ")}":
            depth = max(0, depth - 1)
        elif char == "," and depth == 0:
            rules.append(text[start:i])
            start = i + 1
    rules.append(text[start:])
    return [rule.strip() for rule in rules if rule.strip()]


def _parse_rule(rule: str) -> tuple[str, str]:
    pattern, equals, place = rule.rpartition("=")
    pattern, place = pattern.strip(), place.strip()
    if not equals or not pattern or not place or place[-1] in ")}":
        raise ValueError(f"the override {rule!r} is not of the form pattern=PLACE")
    return pattern, place


def parse_expert_layers(expert_layers: ExpertLayers) -> dict[str, tuple[int, ...]]:
    """Checked {place: block numbers} of {"RPC0[host:port]": [0, 1], "CPU": range(2, 8)}.

    Raises:
        ValueError: not a mapping of places to block numbers, or a block in two places; named.
    """
    if expert_layers is None:
        return {}
    if not isinstance(expert_layers, Mapping):
        raise ValueError(f"expert_layers was {expert_layers!r}; it is a mapping of places to block numbers")
    owner: dict[int, str] = {}
    checked: dict[str, tuple[int, ...]] = {}
    for place, layers in expert_layers.items():
        if not isinstance(place, str) or not place or "\0" in place:
            raise ValueError(f"expert_layers has the place {place!r}; it is the name of one, such as 'CPU'")
        checked[place] = _block_numbers("expert_layers", layers)
        for layer in checked[place]:
            if owner.setdefault(layer, place) != place:
                raise ValueError(f"expert_layers puts block {layer} in {owner[layer]!r} and in {place!r}")
    return checked


def _expert_layer_rules(by_place: Mapping[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    """One rule per place."""
    rules = []
    for place, layers in by_place.items():
        blocks = "|".join(str(layer) for layer in sorted(set(layers)))
        if blocks:
            rules.append((rf"^blk\.({blocks})\.{_ROUTED_EXPERTS}", place))
    return rules


def _block_numbers(name: str, layers: Any) -> tuple[int, ...]:
    if isinstance(layers, (str, bytes, Mapping)) or not isinstance(layers, Iterable):
        raise ValueError(f"{name} was {layers!r}; it is a list of block numbers, 0 or more")
    numbers = tuple(layers)
    if any(isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < 2**31 for layer in numbers):
        raise ValueError(f"{name} was {numbers!r}; it is a list of block numbers, 0 or more")
    return numbers


@dataclass(frozen=True)
class PlanTensor:
    """One tensor of the file. `place` is "STREAM", "CPU", "CPU_ANON", "DEFAULT" (llama.cpp decides) or a buffer type;
    `rule` indexes Plan.rules, None where no rule matched; `layer` is None outside the blocks."""

    name: str
    type: str
    place: str
    rule: int | None
    layer: int | None
    is_expert: bool
    file: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class PlanRule:
    """One rule in force. `origin` is "rules" (overrides and expert_layers), "n_cpu_moe", "cpu_moe_layers", "cpu_moe",
    "stream" or "dense"; `n_matched` and `bytes` count the tensors it won."""

    pattern: str
    place: str
    origin: str
    n_matched: int
    bytes: int


@dataclass(frozen=True)
class PlanClass:
    """Experts of one size: bytes of a cache slot, layers and experts of that size."""

    slot_bytes: int
    n_layers: int
    n_experts: int


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one block (None: the tensors outside the blocks) per place."""

    layer: int | None
    experts: dict[str, int]
    dense: dict[str, int]


@dataclass(frozen=True)
class Plan:
    """What a load with these options will do, from the file's header alone; no weights were read.

    Sizes are bytes. `cycle_bytes` is the cache that one token touches: below it nothing is ever found again.
    `n_expert` is 0 and `first_moe_layer` None for a dense model.
    """

    path: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    first_moe_layer: int | None
    n_files: int
    expert_bytes: int
    dense_bytes: int
    stream_bytes: int
    cycle_bytes: int
    min_cache_bytes: int
    full_cache_bytes: int
    tensors: tuple[PlanTensor, ...] = field(repr=False)
    rules: tuple[PlanRule, ...] = field(repr=False)
    classes: tuple[PlanClass, ...]
    warnings: tuple[str, ...]

    @property
    def bytes_by_place(self) -> dict[str, int]:
        """Bytes of the file's tensors per place; sums to the model's tensor bytes."""
        return _sum_by(self.tensors, lambda tensor: tensor.place)

    @property
    def expert_bytes_by_place(self) -> dict[str, int]:
        """Bytes of routed expert weights per place."""
        return _sum_by((t for t in self.tensors if t.is_expert), lambda tensor: tensor.place)

    @property
    def dense_bytes_by_place(self) -> dict[str, int]:
        """Bytes of everything else per place; expert biases and shared experts are among it."""
        return _sum_by((t for t in self.tensors if not t.is_expert), lambda tensor: tensor.place)

    @property
    def bytes_by_layer(self) -> dict[int | None, int]:
        """Bytes per block number; None for the tensors outside the blocks."""
        return _sum_by(self.tensors, lambda tensor: tensor.layer)

    @property
    def layers(self) -> tuple[LayerBytes, ...]:
        """Bytes per block and place, experts and the rest apart; the tensors outside the blocks come last."""
        rows: dict[int | None, LayerBytes] = {}
        for tensor in self.tensors:
            row = rows.setdefault(tensor.layer, LayerBytes(tensor.layer, {}, {}))
            side = row.experts if tensor.is_expert else row.dense
            side[tensor.place] = side.get(tensor.place, 0) + tensor.bytes
        return tuple(sorted(rows.values(), key=lambda row: (row.layer is None, row.layer or 0)))

    def as_dict(self, tensors: bool = True) -> dict[str, Any]:
        """Plain data for JSON."""
        numbers = {
            name: getattr(self, name)
            for name in (
                *("path", "n_layer", "n_expert", "n_expert_used", "first_moe_layer", "n_files", "expert_bytes"),
                *("dense_bytes", "stream_bytes", "cycle_bytes", "min_cache_bytes", "full_cache_bytes"),
            )
        }
        out: dict[str, Any] = {
            **numbers,
            "size_classes": [vars(item) for item in self.classes],
            "warnings": list(self.warnings),
            "bytes_by_place": self.bytes_by_place,
            "expert_bytes_by_place": self.expert_bytes_by_place,
            "dense_bytes_by_place": self.dense_bytes_by_place,
            "layers": [vars(item) for item in self.layers],
            "rules": [vars(item) for item in self.rules],
        }
        if tensors:
            out["tensors"] = [vars(item) for item in self.tensors]
        return out


def _sum_by(tensors: Iterable[Any], key: Any) -> dict[Any, int]:
    sums: dict[Any, int] = {}
    for tensor in tensors:
        sums[key(tensor)] = sums.get(key(tensor), 0) + tensor.bytes
    return sums


@dataclass(frozen=True)
class TensorPlacement:
    """One tensor of a loaded model: what was planned, and the buffer type it is in, by the tensor's own buffer.
    `buffer_type` is None for a tensor that was not loaded (MTP blocks), or where the library does not tell. `rule` is
    the pattern that won, None where llama.cpp decided. `place` is None for a tensor that is not in the file: llama.cpp
    made it, such as the second copy of an embedding that is the output matrix as well."""

    name: str
    place: str | None
    buffer_type: str | None
    bytes: int
    rule: str | None
    layer: int | None
    is_expert: bool


@dataclass(frozen=True)
class Placement:
    """Where the tensors of a loaded model are."""

    tensors: tuple[TensorPlacement, ...] = field(repr=False)

    @property
    def bytes_by_place(self) -> dict[str | None, int]:
        """Bytes per planned place."""
        return _sum_by(self.tensors, lambda tensor: tensor.place)

    @property
    def bytes_by_buffer_type(self) -> dict[str | None, int]:
        """Bytes of the file's tensors per buffer type that really holds them; sums to the model's tensor bytes."""
        return _sum_by((t for t in self.tensors if t.place is not None), lambda tensor: tensor.buffer_type)

    @property
    def misplaced(self) -> tuple[TensorPlacement, ...]:
        """Tensors that are not where the plan put them. Places that llama.cpp decides cannot be missed, and "CPU" is
        met by any of the CPU's buffer types (a mapped one, a repacked one)."""
        return tuple(tensor for tensor in self.tensors if not _is_at(tensor.place, tensor.buffer_type))


_BUFFER_OF_PLACE = {"STREAM": "MOESTREAM", "CPU_ANON": "MOESTREAM_ANON"}


def _is_at(place: str | None, buffer_type: str | None) -> bool:
    if place in (None, "DEFAULT") or buffer_type is None:
        return True
    if place == "CPU":
        return buffer_type == "CPU" or buffer_type.startswith("CPU_")
    return buffer_type in (_BUFFER_OF_PLACE.get(str(place), place), f"{place}_Mapped")


@dataclass(frozen=True)
class PlaceOptions:
    """The options that decide where tensors go, as Model and plan take them; see Model for each."""

    stream: Stream | None = None
    n_gpu_layers: int = 0
    cpu_moe: bool = False
    n_cpu_moe: int = 0
    cpu_moe_layers: tuple[int, ...] = ()
    rules: tuple[tuple[str, str], ...] = ()
    named_layers: tuple[int, ...] = ()  # blocks that expert_layers names

    @classmethod
    def of(
        cls,
        *,
        stream: Stream | bool | None,
        n_gpu_layers: int,
        cpu_moe: bool,
        n_cpu_moe: int,
        cpu_moe_layers: Iterable[int] | None,
        overrides: Overrides,
        expert_layers: ExpertLayers = None,
    ) -> PlaceOptions:
        """Checks and normalises. Raises ValueError or TypeError for what makes no sense, naming the option."""
        for name, value in (("n_gpu_layers", n_gpu_layers), ("n_cpu_moe", n_cpu_moe)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} was {value!r}; it is a whole number")
        if n_cpu_moe < 0:
            raise ValueError(f"n_cpu_moe was {n_cpu_moe}; it is a number of blocks, 0 or more")
        listed = () if cpu_moe_layers is None else _block_numbers("cpu_moe_layers", cpu_moe_layers)
        by_place = parse_expert_layers(expert_layers)
        return cls(
            stream=as_stream(stream),
            n_gpu_layers=max(-(2**31), min(n_gpu_layers, 2**31 - 1)),
            cpu_moe=checks.switch("cpu_moe", cpu_moe),
            n_cpu_moe=min(n_cpu_moe, 2**31 - 1),
            cpu_moe_layers=listed,
            rules=(*parse_overrides(overrides), *_expert_layer_rules(by_place)),
            named_layers=tuple(sorted({layer for layers in by_place.values() for layer in layers})),
        )

    def check_layers(self, made: Plan) -> None:
        """Raises InvalidError where expert_layers names a block that the file does not have."""
        last = max((tensor.layer for tensor in made.tensors if tensor.layer is not None), default=-1)
        if self.named_layers and self.named_layers[-1] > last:
            raise InvalidError(f"expert_layers names block {self.named_layers[-1]}, the model has blocks 0 to {last}")

    def check_replay(self, made: Plan) -> None:
        """Raises InvalidError where a recorded routing is not one of this model."""
        replay = None if self.stream is None else self.stream.replay
        if replay is None:
            return
        want = (made.n_layer, made.n_expert_used)
        if replay.shape[1:] != want:
            raise InvalidError(
                f"replay has the shape {replay.shape}; this model takes [n_tokens, {want[0]}, {want[1]}]"
            )
        if replay.min() < 0 or replay.max() >= made.n_expert:
            at = tuple(int(i[0]) for i in ((replay < 0) | (replay >= made.n_expert)).nonzero())
            raise InvalidError(f"replay names expert {replay[at]} at {list(at)}; there are {made.n_expert}, from 0 on")

    def to_c(self, cache_bytes: int = 0, libllama: Any = None) -> tuple[Any, list[Any]]:
        """A moestream_params, and what must live as long as it is in use. `libllama`: a handle, None for ours."""
        ffi, lib = native.ffi, native.lib
        params = native.new_struct("moestream_params")
        params.libllama = ffi.NULL if libllama is None else libllama
        keep: list[Any] = []
        if self.rules:
            rules = ffi.new("moestream_rule[]", len(self.rules))
            for i, (pattern, place) in enumerate(self.rules):
                keep += [ffi.new("char[]", pattern.encode()), ffi.new("char[]", place.encode())]
                rules[i].pattern, rules[i].place = keep[-2], keep[-1]
            keep.append(rules)
            params.rules, params.n_rules = rules, len(self.rules)
        params.n_cpu_moe = self.n_cpu_moe
        params.cpu_moe = int(self.cpu_moe)
        params.n_gpu_layers = self.n_gpu_layers
        if self.cpu_moe_layers:
            layers = ffi.new("int32_t[]", self.cpu_moe_layers)
            keep.append(layers)
            params.cpu_moe_layers, params.n_cpu_moe_layers = layers, len(self.cpu_moe_layers)
        stream = self.stream
        if stream is None:
            params.stream = lib.MOESTREAM_STREAM_OFF
            return params, keep
        params.stream = lib.MOESTREAM_STREAM_ON
        for option in ("io", "direct", "dense", "prefetch"):
            setattr(params, option, getattr(lib, stream.constant(option)))
        params.queue_depth, params.n_readers = stream.queue_depth, stream.readers
        params.verify = int(stream.verify)
        params.deadline_ms = round(stream.deadline_s * 1000)
        params.cache_none = int(stream.cache_size.is_none)
        params.cache_bytes = cache_bytes
        if stream.warm_start is not None:
            keep.append(ffi.new("char[]", native.encode_path(stream.warm_start)))
            params.warm_start = keep[-1]
        if stream.replay is not None:
            ids = ffi.from_buffer("int32_t[]", stream.replay.astype("int32", order="C"))
            keep.append(ids)
            params.replay_ids, params.n_replay_tokens = ids, len(stream.replay)
            params.replay_recall = stream.replay_recall
        return params, keep

    def resolve_cache(self, path: str | os.PathLike[str], libllama: Any = None) -> int:
        """Bytes for moestream_params.cache_bytes; reads the header only where the size depends on it."""
        if self.stream is None:
            return 0
        size = self.stream.cache_size
        if not size.needs_plan:
            return size.resolve(0, 0)
        planned = open_plan(path, self, libllama)
        return size.resolve(planned.full_cache_bytes, planned.min_cache_bytes)


def plan(
    path: str | os.PathLike[str],
    *,
    stream: Stream | bool | None = None,
    n_gpu_layers: int = 0,
    cpu_moe: bool = False,
    n_cpu_moe: int = 0,
    cpu_moe_layers: Iterable[int] | None = None,
    expert_layers: ExpertLayers = None,
    overrides: Overrides = None,
    strict: bool = False,
) -> Plan:
    """What a load of `path` with these options would do. Reads the header only. Options as for Model.

    Raises:
        ReadError, FormatError, TruncatedError: the file.
        InvalidError: a pattern or place that means nothing, a shard other than the first; with `strict`, any warning.
    """
    checks.switch("strict", strict)
    options = PlaceOptions.of(
        stream=stream,
        n_gpu_layers=n_gpu_layers,
        cpu_moe=cpu_moe,
        n_cpu_moe=n_cpu_moe,
        cpu_moe_layers=cpu_moe_layers,
        overrides=overrides,
        expert_layers=expert_layers,
    )
    made = open_plan(path, options)
    options.check_layers(made)
    if strict:
        refuse_warnings(made)
    return made


def refuse_warnings(made: Plan) -> None:
    """Raises InvalidError if the plan has warnings (strict=True)."""
    if made.warnings:
        raise InvalidError("strict: " + "; ".join(made.warnings))


def open_plan(path: str | os.PathLike[str], options: PlaceOptions, libllama: Any = None) -> Plan:
    """Makes a plan with moestream_plan_open, and copies it out. `libllama`: a handle that is bound, None for ours."""
    if libllama is None:
        native.bind()
    ffi, lib = native.ffi, native.lib
    params, keep = options.to_c(libllama=libllama)
    out, err = ffi.new("moestream_plan **"), native.new_error()
    raw_path = native.encode_path(path)
    try:
        native.check(lib.moestream_plan_open(out, raw_path, params, err), err, os.fsdecode(raw_path))
        try:
            return read_plan(out[0], os.fsdecode(raw_path))
        finally:
            lib.moestream_plan_close(out[0])
    finally:
        del keep
        logs.drain()


def open_store(
    path: str | os.PathLike[str], options: PlaceOptions, out: Any, *, strict: bool, libllama: Any = None
) -> Plan:
    """moestream_open with these options: returns the plan that is in force.

    `out` is a moestream *[1] of the caller's that C writes the store to; the caller closes it. `libllama` is a handle
    that is bound, None for ours. Raises what Model raises; nothing is left open then, and `out` is NULL.
    """
    lib = native.lib
    raw_path = native.encode_path(path)
    if options.stream is not None and options.stream.replay is not None:
        options.check_replay(open_plan(path, options))  # before C reads as many numbers as the model has layers
    params, keep = options.to_c(options.resolve_cache(path, libllama), libllama)
    err = native.new_error()
    try:
        native.check(lib.moestream_open(out, raw_path, params, err), err, os.fsdecode(raw_path))
        del keep
        made = read_plan(lib.moestream_get_plan(out[0]), os.fsdecode(raw_path))
        options.check_layers(made)
        if strict:
            refuse_warnings(made)
    except BaseException:
        uninterrupted(lambda: _close_cell(out))
        raise
    return made


def _close_cell(cell: Any) -> None:
    store, cell[0] = cell[0], native.ffi.NULL
    if store != native.ffi.NULL:
        native.lib.moestream_close(store, native.ffi.NULL)


def read_plan(handle: Any, path: str) -> Plan:
    """Copies a C plan into Python."""
    lib = native.lib
    info = native.new_struct("moestream_plan_info")
    native.check(lib.moestream_plan_get_info(handle, info))
    return Plan(
        path=path,
        n_layer=info.n_layer,
        n_expert=info.n_expert,
        n_expert_used=info.n_expert_used,
        first_moe_layer=None if info.first_moe_layer < 0 else info.first_moe_layer,
        n_files=info.n_files,
        expert_bytes=info.expert_bytes,
        dense_bytes=info.dense_bytes,
        stream_bytes=info.stream_bytes,
        cycle_bytes=info.cycle_bytes,
        min_cache_bytes=info.min_cache_bytes,
        full_cache_bytes=info.full_cache_bytes,
        tensors=tuple(_read_tensors(handle, info.n_tensors)),
        rules=tuple(_read_rules(handle, info.n_rules)),
        classes=tuple(_read_classes(handle, info.n_classes)),
        warnings=tuple(native.text(lib.moestream_plan_warning(handle, i)) for i in range(info.n_warnings)),
    )


def _read_tensors(handle: Any, n: int) -> Iterable[PlanTensor]:
    item = native.new_struct("moestream_plan_tensor")
    for i in range(n):
        native.check(native.lib.moestream_plan_get_tensor(handle, i, item))
        yield PlanTensor(
            name=native.text(item.name),
            type=native.text(item.type),
            place=native.text(item.place),
            rule=None if item.rule < 0 else item.rule,
            layer=None if item.layer < 0 else item.layer,
            is_expert=bool(item.is_expert),
            file=item.file,
            offset=item.offset,
            bytes=item.bytes,
        )


def _read_rules(handle: Any, n: int) -> Iterable[PlanRule]:
    item = native.new_struct("moestream_plan_rule")
    for i in range(n):
        native.check(native.lib.moestream_plan_get_rule(handle, i, item))
        yield PlanRule(
            pattern=native.text(item.pattern),
            place=native.text(item.place),
            origin=native.text(item.origin),
            n_matched=item.n_matched,
            bytes=item.bytes,
        )


def _read_classes(handle: Any, n: int) -> Iterable[PlanClass]:
    item = native.new_struct("moestream_plan_class")
    for i in range(n):
        native.check(native.lib.moestream_plan_get_class(handle, i, item))
        yield PlanClass(slot_bytes=item.slot_bytes, n_layers=item.n_layers, n_experts=item.n_experts)


def model_placement(model_pointer: Any, planned: Plan) -> Placement:
    """Joins the plan with the buffer types that moestream_model_tensor reports for a loaded model."""
    lib, ffi = native.lib, native.ffi
    n = lib.moestream_model_n_tensors(ffi.NULL, model_pointer)
    # A tied embedding is in the list twice under one name: the input's stays with the host, the other is made for the
    # output.
    actual: dict[str, list[tuple[str, int]]] = {}
    item, err = native.new_struct("moestream_tensor_place"), native.new_error()
    for i in range(max(n, 0)):
        native.check(lib.moestream_model_tensor(ffi.NULL, model_pointer, i, item, err), err)
        same = actual.setdefault(native.text(item.name), [])
        same.insert(0 if item.is_host else len(same), (native.text(item.buffer_type), item.bytes))
    rows = []
    for tensor in planned.tensors:
        found = actual.get(tensor.name)
        buffer_type = found.pop(0)[0] if found else None
        rows.append(
            TensorPlacement(
                name=tensor.name,
                place=tensor.place,
                buffer_type=buffer_type,
                bytes=tensor.bytes,
                rule=None if tensor.rule is None else planned.rules[tensor.rule].pattern,
                layer=tensor.layer,
                is_expert=tensor.is_expert,
            )
        )
    for name, left in actual.items():
        rows += [TensorPlacement(name, None, buffer_type, size, None, None, False) for buffer_type, size in left]
    return Placement(tuple(rows))
