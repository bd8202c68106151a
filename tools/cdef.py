#!/usr/bin/env python3
"""Derives the cffi declarations of moestream from C headers.

Two sources, two treatments. The declarations of moestream.h are the text between its two cdef marks, cleaned of
comments; they are committed (python/moestream/_cdef_moestream.h) and `--check` fails when the header has moved on.
Those of llama.cpp are never committed: a named list of functions is looked up in whatever llama.h and ggml headers a
build uses, together with the types they need, so that any recent commit gives a matching module. What a commit does
not declare is left out, by name, never guessed.

It guarantees: enumerator values and struct layouts come from the compiler (cffi's `...`), never from this text.
It never does: run a C preprocessor, look at conditional branches by value, or mirror a struct by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "csrc" / "include" / "moestream.h"
COMMITTED = ROOT / "python" / "moestream" / "_cdef_moestream.h"
LLAMA_HEADERS = ("llama.h", "ggml.h", "ggml-backend.h", "ggml-cpu.h")


def _names(text: str) -> list[str]:
    """Words of a list that is easier to read and to change as plain text."""
    return text.split()


# Without these there is no model, no decode and no text: a llama.cpp that lacks one is refused.
REQUIRED_FUNCTIONS = _names("""
llama_model_default_params llama_context_default_params llama_sampler_chain_default_params
llama_backend_init llama_model_load_from_file llama_model_free llama_init_from_model llama_free
llama_max_devices llama_supports_gpu_offload
llama_n_ctx llama_n_batch llama_n_ubatch llama_n_seq_max llama_get_memory llama_model_get_vocab
llama_model_n_ctx_train llama_model_n_embd llama_model_n_layer llama_vocab_n_tokens
llama_model_meta_val_str llama_model_meta_count llama_model_meta_key_by_index llama_model_meta_val_str_by_index
llama_model_desc llama_model_size llama_model_n_params llama_model_chat_template llama_model_has_encoder
llama_memory_clear llama_memory_seq_rm llama_memory_seq_cp llama_memory_seq_add
llama_memory_seq_pos_min llama_memory_seq_pos_max llama_memory_can_shift
llama_state_get_size llama_state_get_data llama_state_set_data
llama_decode llama_set_n_threads llama_n_threads llama_n_threads_batch llama_synchronize
llama_get_logits llama_get_logits_ith llama_get_embeddings llama_get_embeddings_seq
llama_vocab_is_eog llama_vocab_bos llama_vocab_eos llama_vocab_get_add_bos
llama_tokenize llama_token_to_piece llama_detokenize llama_chat_apply_template
llama_sampler_chain_init llama_sampler_chain_add llama_sampler_init_greedy llama_sampler_init_dist
llama_sampler_init_top_k llama_sampler_init_top_p llama_sampler_init_min_p llama_sampler_init_temp
llama_sampler_sample llama_sampler_accept llama_sampler_reset llama_sampler_free
ggml_backend_dev_count ggml_backend_dev_get ggml_backend_dev_by_name ggml_backend_dev_name
ggml_backend_dev_description ggml_backend_dev_memory ggml_backend_buft_name
""")

# Each of these serves one feature; where it is missing, that feature says so and the rest works.
OPTIONAL_FUNCTIONS = _names("""
llama_version llama_max_tensor_buft_overrides llama_max_parallel_sequences llama_supports_mmap llama_supports_mlock
llama_print_system_info llama_time_us llama_log_set
llama_model_load_from_splits llama_model_load_from_file_ptr llama_attach_threadpool llama_detach_threadpool
llama_n_ctx_seq llama_get_model llama_pooling_type llama_model_n_embd_out llama_model_n_head llama_model_n_head_kv
llama_model_n_swa llama_model_ftype llama_model_has_decoder llama_model_is_recurrent llama_model_is_hybrid
llama_vocab_type llama_vocab_eot llama_vocab_nl llama_vocab_get_text llama_vocab_get_score llama_vocab_get_attr
llama_vocab_is_control llama_vocab_get_add_eos llama_load_mode_name llama_flash_attn_type_name llama_ftype_name
llama_memory_seq_keep llama_memory_seq_div
llama_state_seq_get_size llama_state_seq_get_data llama_state_seq_set_data
llama_encode llama_batch_init llama_batch_free llama_batch_get_one llama_set_embeddings llama_set_causal_attn
llama_set_abort_callback llama_set_warmup llama_get_embeddings_ith llama_chat_builtin_templates
llama_sampler_name llama_sampler_apply llama_sampler_clone llama_sampler_chain_get llama_sampler_chain_n
llama_sampler_init_penalties llama_sampler_init_typical llama_sampler_init_grammar llama_sampler_get_seed
llama_adapter_lora_init llama_adapter_lora_free llama_set_adapters_lora
llama_perf_context llama_perf_context_reset
ggml_version ggml_commit ggml_backend_dev_type ggml_backend_dev_buffer_type ggml_backend_load_all_from_path
ggml_backend_reg_by_name ggml_backend_reg_get_proc_address ggml_backend_register ggml_backend_unload
ggml_backend_reg_dev_count ggml_backend_reg_dev_get
ggml_backend_buft_is_host ggml_backend_reg_count ggml_type_name ggml_cpu_has_avx2 ggml_cpu_has_neon
ggml_threadpool_params_default ggml_threadpool_new ggml_threadpool_free
""")

# Structs whose fields Python reads or writes. Every other struct stays opaque.
OPEN_STRUCTS = frozenset(
    _names("""
llama_model_params llama_context_params llama_batch llama_model_kv_override llama_model_tensor_buft_override
llama_sampler_chain_params llama_chat_message llama_token_data llama_token_data_array llama_perf_context_data
ggml_threadpool_params
""")
)

_WORD = re.compile(r"[A-Za-z_]\w*")
_C_WORDS = frozenset(
    _names("""void char short int long float double signed unsigned const volatile struct union enum typedef bool _Bool
    size_t int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t uintptr_t intptr_t ptrdiff_t""")
)


class HeaderError(Exception):
    """A header did not have the shape this file relies on."""


def strip_comments(text: str) -> str:
    """The text without comments; string literals are respected, line breaks kept."""
    pattern = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*.*?\*/|//[^\n]*', re.S)

    def keep(match: re.Match[str]) -> str:
        found = match.group()
        return found if found.startswith('"') else "\n" * found.count("\n") + " "

    return pattern.sub(keep, text)


def strip_preprocessor(text: str) -> str:
    """The text without directives (with their continuation lines) and without `#ifdef __cplusplus` branches."""
    out: list[str] = []
    depth_skipped = 0
    for line in re.sub(r"\\\n", " ", text).split("\n"):
        bare = line.strip()
        if not bare.startswith("#"):
            if not depth_skipped:
                out.append(line)
            continue
        word = bare[1:].strip()
        if depth_skipped:
            if word.startswith("if"):
                depth_skipped += 1
            elif word.startswith("endif") or (word.startswith("el") and depth_skipped == 1):
                depth_skipped -= 1
        elif re.match(r"ifdef\s+__cplusplus\b|if\s+defined\s*\(?\s*__cplusplus\b", word):
            depth_skipped = 1
    return "\n".join(out)


def moestream_cdef(header: str) -> str:
    """The declarations between the cdef marks of moestream.h, as committed beside the Python package."""
    match = re.search(r"/\* cdef:begin \*/(.*?)/\* cdef:end \*/", header, re.S)
    if match is None:
        raise HeaderError("moestream.h has no cdef:begin and cdef:end marks")
    text = strip_comments(match.group(1))
    if "#" in text or "MOESTREAM_API" in text:
        raise HeaderError("between the cdef marks of moestream.h there must be plain declarations only")
    lines = [line.rstrip() for line in text.split("\n") if line.strip()]
    return "/* Generated from csrc/include/moestream.h by tools/cdef.py. Do not edit. */\n" + "\n".join(lines) + "\n"


@dataclass
class Declarations:
    """What a set of headers declares at file level, by name."""

    functions: dict[str, str] = field(default_factory=dict)
    typedefs: dict[str, str] = field(default_factory=dict)
    structs: dict[str, str] = field(default_factory=dict)  # name -> body between the braces
    enums: dict[str, str] = field(default_factory=dict)

    def add(self, header: str) -> None:
        """Indexes one header's text; a name declared twice keeps its first declaration."""
        text = strip_preprocessor(strip_comments(header))
        text = re.sub(r'extern\s+"C"\s*\{', " ", text)
        for item in _split_top_level(text):
            self._add_item(item)

    def _add_item(self, item: str) -> None:
        item = " ".join(item.split())
        item = re.sub(r"__attribute__\s*\(\(.*?\)\)\s*", "", item)
        deprecated = re.match(r"((?:LLAMA_API )?)DEPRECATED\((.*),\s*\".*\"\s*\)$", item)
        if deprecated:
            item = deprecated.group(1) + deprecated.group(2)
        aggregate = re.match(r"(typedef )?(struct|enum) (\w+) \{(.*)\} ?(\w*)$", item)
        if aggregate:
            is_typedef, kind, name, body, alias = aggregate.groups()
            (self.structs if kind == "struct" else self.enums).setdefault(name, body.strip())
            if is_typedef and alias:
                self.typedefs.setdefault(alias, f"typedef {kind} {name} {alias};")
            return
        if item.startswith("typedef ") and "{" not in item:
            pointer = re.search(r"\(\s*\*\s*(\w+)\s*\)\s*\(", item)
            name = pointer.group(1) if pointer else _WORD.findall(re.sub(r"\[.*?\]", "", item))[-1]
            self.typedefs.setdefault(name, item + ";")
            return
        bare = re.sub(r"\b(?:LLAMA_API|GGML_API|GGML_BACKEND_API|GGML_CALL|extern)\b ?", "", item).strip()
        function = re.match(r"([\w\s*]+?)\b(\w+) ?\((.*)\)$", bare)
        if function and not bare.startswith(("static", "typedef")) and "{" not in bare:
            self.functions.setdefault(function.group(2), bare + ";")


def _split_top_level(text: str) -> list[str]:
    """Cuts at each `;` outside braces and parentheses; a function body ends its item as well."""
    items: list[str] = []
    start = depth = 0
    for i, char in enumerate(text):
        if char in "{(":
            depth += 1
        elif char in "})":
            depth = max(0, depth - 1)
            if char == "}" and depth == 0 and re.search(r"\)\s*\{", text[start : i + 1]):
                start = i + 1
        elif char == ";" and depth == 0:
            items.append(text[start:i].strip())
            start = i + 1
    return [item for item in items if item]


@dataclass(frozen=True)
class LlamaCdef:
    """Declarations of llama.cpp for cffi, and which functions they offer."""

    text: str
    functions: tuple[str, ...]
    left_out: tuple[str, ...]  # asked for, not declared by these headers


def llama_cdef(headers: list[str]) -> LlamaCdef:
    """Extracts the named functions, and the types they need, from the texts of llama.h and the ggml headers."""
    found = Declarations()
    for header in headers:
        found.add(header)
    missing = [name for name in REQUIRED_FUNCTIONS if name not in found.functions]
    if missing:
        raise HeaderError(f"this llama.cpp does not declare {', '.join(missing)}; it is too old or too new")
    types = _Types(found)
    offered = []
    left_out = []
    for name in REQUIRED_FUNCTIONS + OPTIONAL_FUNCTIONS:
        try:
            types.need_text(found.functions[name])
            offered.append(name)
        except (HeaderError, KeyError):
            if name in REQUIRED_FUNCTIONS:
                raise
            left_out.append(name)
    for name in sorted(OPEN_STRUCTS):
        types.need_struct(name)
    lines = types.opaque() + types.lines + [found.functions[name] for name in offered]
    return LlamaCdef("\n".join(lines) + "\n", tuple(offered), tuple(left_out))


class _Types:
    """Collects type declarations so that each comes after those it names."""

    def __init__(self, found: Declarations) -> None:
        self.found = found
        self.lines: list[str] = []
        self._done: set[tuple[str, str]] = set()
        self._opaque: set[str] = set()

    def opaque(self) -> list[str]:
        return [f"struct {name};" for name in sorted(self._opaque)]

    def need_text(self, text: str) -> None:
        """Asks for every type that a declaration names."""
        for kind, name in re.findall(r"\b(struct|enum) (\w+)", text):
            if kind == "struct":
                self.need_struct(name)
            else:
                self.need_enum(name)
        tagged = {name for _, name in re.findall(r"\b(struct|enum) (\w+)", text)}
        for word in _WORD.findall(text):
            if word not in _C_WORDS and word not in tagged and word in self.found.typedefs:
                self.need_typedef(word)

    def need_typedef(self, name: str) -> None:
        if self._seen("typedef", name):
            return
        declaration = self.found.typedefs[name]
        self.need_text(re.sub(rf"\b{name}\b", "", declaration))
        self.lines.append(declaration)

    def need_enum(self, name: str) -> None:
        if self._seen("enum", name):
            return
        body = self.found.enums.get(name)
        if body is None:
            raise HeaderError(f"enum {name} is used but not declared by these headers")
        names = [part.split("=")[0].strip() for part in body.split(",") if part.strip()]
        # Values are left to the compiler: cffi reads them from the real enum.
        self.lines.append(f"enum {name} {{ {', '.join(names)}, ... }};")

    def need_struct(self, name: str) -> None:
        if self._seen("struct", name):
            return
        self._opaque.add(name)
        body = self.found.structs.get(name)
        if name not in OPEN_STRUCTS or body is None:
            return
        self.need_text(body)
        body = re.sub(r"\[\s*[A-Za-z_]\w*\s*\]", "[...]", body)  # a named length: the compiler knows it
        self.lines.append(f"struct {name} {{ {body} ...; }};")

    def _seen(self, kind: str, name: str) -> bool:
        """Whether this type was asked for before; remembers that it now was."""
        seen = (kind, name) in self._done
        self._done.add((kind, name))
        return seen


def find_llama_headers(folders: list[Path]) -> list[str]:
    """The texts of the llama.cpp headers, looked for in the given include folders and in their usual neighbours."""
    places = list(folders)
    for folder in folders:
        places += [folder / "include", folder / "ggml" / "include", folder.parent / "ggml" / "include"]
    texts = []
    for name in LLAMA_HEADERS:
        path = next((place / name for place in places if (place / name).is_file()), None)
        if path is None:
            raise HeaderError(f"{name} was not found in {', '.join(str(f) for f in folders)}")
        texts.append(path.read_text(encoding="utf-8"))
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description="Derive the cffi declarations of moestream.h.")
    parser.add_argument("--header", type=Path, default=HEADER, help="moestream.h (default: the one in the tree)")
    parser.add_argument("--out", type=Path, default=COMMITTED, help="the derived file")
    parser.add_argument("--check", action="store_true", help="only compare; status 1 if the derived file is stale")
    parser.add_argument("--llama-include", help="print the llama.cpp declarations found in DIR[;DIR2] instead")
    args = parser.parse_args()
    try:
        if args.llama_include:
            found = llama_cdef(find_llama_headers([Path(p) for p in args.llama_include.split(";") if p]))
            print(found.text, end="")
            print(f"{len(found.functions)} functions, left out: {', '.join(found.left_out) or 'none'}", file=sys.stderr)
            return 0
        text = moestream_cdef(args.header.read_text(encoding="utf-8"))
    except (HeaderError, OSError) as error:
        print(f"cdef: {error}", file=sys.stderr)
        return 1
    if args.check:
        if not args.out.is_file() or args.out.read_text(encoding="utf-8") != text:
            print(f"cdef: {args.out} is not what {args.header} gives; run tools/cdef.py", file=sys.stderr)
            return 1
        return 0
    args.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
