"""Planted faults: is each seen by the tests that are there for it?

``python -m tests.planted [--all] [PATTERN ...]``.

Every fault is one change of the source, applied to a temporary copy of the tree in which the tests
named are run: of a file the usual ones, and with ``--all`` the slow ones too; a single test, as
``file.py::test``, in any case. A pattern selects faults by name. ``--tree`` plants
them in another checkout of the repository, such as an older suite. Exit code 1 if a fault was not
caught, or its text is no longer in the source.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest


class Fault(NamedTuple):
    """A mistake that somebody could make.

    Attributes:
        name: what is wrong then.
        file: of the package.
        tests: what should see it, files or single tests below ``tests``; separated by spaces.
        old, new: the text to replace, of which there is exactly one, and what replaces it.
    """

    name: str
    file: str
    tests: str
    old: str
    new: str


LOOP, DEVICE, RULE = (
    "decoding/test_loop.py",
    "decoding/test_device_step.py",
    "sampling/test_rule.py",
)
GENERATE, STOPS = "test_custom_generate.py", "decoding/test_stops.py"
CACHES, KERNEL, NATIVE = "test_caches.py", "attention/test_triton.py", "attention/test_native.py"
CHUNKED = "attention/test_chunked.py"
KEPT = "drafting/test_methods.py::test_no_cache_outlives_its_decode"
BUILDING = "test_native_build.py"
NETWORKS, TREES_OF = "speculators/test_networks.py", "drafting/test_networks.py"
KV_DTYPE, PROGRAM = "forward/test_kv_dtype.py", "forward/test_program.py"
CODES, CODES_ON_DEVICE = "forward/test_codes.py", "forward/test_codes_on_device.py"
FLOATS = "forward/test_floats.py"
WALK = "decoding/test_device_tree.py"
INTEGERS, ARCHITECTURES = "forward/test_integers.py", "forward/test_architectures.py"
GGUF = "models/test_gguf.py"
TOKENIZER = "models/test_gguf_tokenizer.py"
REMEMBERED, CHECKING = "test_remembered.py", "test_checking.py"
RECURRENT = "forward/test_recurrent.py"
MTP = "speculators/test_mtp.py"
ASSISTANTS = "speculators/test_assistant.py"
NAMES = "decoding/test_client_names.py"
SAMPLER_C, MANY = "sampling/test_sampler_c.py", "cli/test_prompts.py"
WIDE_CHUNKS = (
    "lossless/test_tokens.py"
    "::test_a_prompt_in_wide_chunks_is_the_same_for_every_method_resume_and_audit"
)
DIFFER, CLASSES = "forward/test_layers_that_differ.py", "models/test_classes.py"
FAULTS = [
    # layers that differ, and models around a decoder
    Fault("a layer's keys are chosen by its own queries alone", "caches.py", DIFFER,
          "if other.source == layer]", "if each == layer]"),
    Fault("shared keys are kept twice", "caches.py", DIFFER, "if own.source == layer:", "if True:"),
    Fault("tables of embeddings are read as a whole", "models/shapes.py", DIFFER,
          "tables = {module.weight for module in network.modules() if isinstance(module, nn.Embedding)}",
          "tables = {module.weight for module in network.modules() if isinstance(module, nn.Linear)}"),
    Fault("weights that see are read", "models/architecture.py", CLASSES, "setattr(module, name, None)", "pass"),
    Fault("the shorter text's turns", "models/architecture.py", CLASSES,
          '"long_factor" if config.max', '"short_factor" if config.max'),
    # presence and frequency
    Fault("presence is taken off as often as a token is there", "sampling/rule.py", NAMES,
          "own.presence_penalty * (counts > 0).double()", "own.presence_penalty * counts"),
    Fault("presence is rounded to float32", "sampling/rule.py", NAMES, "(counts > 0).double()", "(counts > 0)"),
    Fault("a sibling's token counts", "sampling/rule.py", NAMES,
          "drafted = ancestors[:, 1:].to(torch.float64)",
          "drafted = torch.ones_like(ancestors[:, 1:], dtype=torch.float64)"),
    Fault("the root counts twice", "sampling/sampler.c", SAMPLER_C,
          "for (int64_t other = 1; counts &&", "for (int64_t other = 0; counts &&"),
    Fault("the prompt counts", "sampling/rule.py", NAMES,
          "generated = tokens[max(0, self.prompt - self.length) :]", "generated = tokens"),
    Fault("what was written before counts as a prompt", "decoding/loop.py", NAMES,
          "target.device, prompt=len(prompt))", "target.device, prompt=len(prompt) + len(written))"),
    Fault("a sibling's token counts in C", "sampling/sampler.c", SAMPLER_C,
          "times += path[other] && c->tokens[other] == token;", "times += c->tokens[other] == token;"),
    Fault("heads draft as if nothing was generated", "drafting/heads.py", PROGRAM,
          "counts = sampler.counts if sampler.counting else None", "counts = None"),
    Fault("heads draft as if nothing was generated, without C", "sampling/rule.py", PROGRAM,
          "logits = logits - self._taken(self.counts)\n", "pass\n"),
    Fault("recall guesses as if nothing was generated", "drafting/history.py", "drafting/test_history.py",
          "sampler.counts.numpy() if sampler.counting and self._on_host else None,", "None,"),
    Fault("a draft vocabulary's tokens count by their places", "sampling/sampler.c", PROGRAM,
          "counts ? counts[ids[t]] : 0", "counts ? counts[t] : 0"),
    Fault("a token that is twice on a path counts once in C", "sampling/sampler.c", SAMPLER_C,
          "times += path[other] && c->tokens[other] == token;", "times = counts[token] + 1;"),
    Fault("presence is taken off as often as a token is there in C", "sampling/sampler.c", SAMPLER_C,
          "c->presence * (times > 0)", "c->presence * times"),
    Fault("the device counts nothing", "decoding/device_step.py", DEVICE,
          "        sampler.count_rows(path.tokens[steps], path.count)\n", ""),
    Fault("the device counts what was not accepted", "sampling/rule.py", DEVICE,
          "self.counts.index_add_(0, self._ids(tokens), appended.double())",
          "self.counts.index_add_(0, self._ids(tokens), torch.ones_like(appended).double())"),
    Fault("plain steps count on from the ones before", "decoding/device_step.py", DEVICE,
          "if sampler.counting:\n            context", "if False:\n            context"),
    # conversations
    Fault("a conversation's cache keeps what was said otherwise", "decoding/loop.py", "jobs/test_chat.py",
          "earlier._kv.length) if alike is None else alike", "earlier._kv.length)"),
    Fault("a history does not know of what is in the cache already", "decoding/loop.py", "jobs/test_chat.py",
          "            history.committed(begun)\n", "            pass\n"),
    Fault("what was left of an answer was not said", "jobs/chat.py", "jobs/test_chat.py",
          '{"role": "assistant", "content": "".join(given)}]', '{"role": "assistant", "content": ""}]'),
    # what clients of vLLM and transformers send
    Fault("only what was generated is penalised for its repetition", "sampling/rule.py", NAMES,
          "(self.newest > FAR).repeat", "(self.newest >= self.prompt).repeat"),
    Fault("a sibling's token is penalised for its repetition", "sampling/rule.py", NAMES,
          "self._with_path(there, tokens, ancestors)", "self._with_path(there, tokens, torch.ones_like(ancestors))"),
    Fault("a path's tokens are not penalised for their repetition in C", "sampling/sampler.c", SAMPLER_C,
          "lowered(c, logit, newest != 0, times)", "lowered(c, logit, 0, times)"),
    Fault("biases come after repetition in C", "sampling/sampler.c", SAMPLER_C,
          "const int first = c->repetition != 1;", "const int first = 0;"),
    Fault("an end may be drawn one token early", "sampling/rule.py", NAMES,
          "self._without_early_ends(logits, positions + 1)", "self._without_early_ends(logits, positions + 2)"),
    Fault("PyTorch drafts ends that come too early", "sampling/rule.py", f"{SAMPLER_C}::test_candidates_are_those_of_pytorch",
          "logits = self._without_early_ends(logits, there)", "logits"),
    Fault("methods keep logits where a pass takes longer than is said", "drafting/history.py", "test_docs.py",
          "_SLOW_PASS = 8e-3", "_SLOW_PASS = 9e-3"),
    Fault("an end may be drawn one token early in C", "sampling/sampler.c", SAMPLER_C,
          "c->positions[row] + c->ahead < c->first)", "c->positions[row] + c->ahead + 1 < c->first)"),
    Fault("ids that end a text may come too early", "sampling/parameters.py", NAMES,
          "(*self.ends, *self.stop_token_ids)", "self.ends"),
    Fault("special tokens are shown", "decoding/text.py", NAMES,
          "frozenset(special) if rules.skip_special else frozenset()", "frozenset()"),
    Fault("a stop string ends a text too early", "decoding/text.py", NAMES,
          "return self._count <= self._rules.least", "return False"),
    Fault("several texts have one seed", "serving/requests.py", "serving/test_server.py::test_several_texts_of_a_request",
          'rest["seed"] + index', 'rest["seed"]'),
    # many texts
    Fault("a finished text is told of again", "jobs/batch.py", MANY,
          "left = [task for task in tasks if not task.done]", "left = [*tasks]"),
    Fault("texts are put together while some are missing", "jobs/batch.py", MANY,
          "if not all(task.done for task in self.tasks):", "if not any(task.done for task in self.tasks):"),
    Fault("a shard leaves out its first text", "jobs/batch.py", MANY,
          "self.tasks[index - 1 :: count]", "self.tasks[index + count - 1 :: count]"),
    Fault("texts stand in another order", "jobs/batch.py", MANY,
          'f"{line_of(task)}\\n" for task in self.tasks)', 'f"{line_of(task)}\\n" for task in self.tasks[::-1])'),
    Fault("a line's own seed stays for those behind it", "jobs/batch.py", MANY,
          'changed(self.config, {**own, "prompt_text": text.text, "out": folder}),',
          'self.__dict__.update(config=changed(self.config, {**own, "prompt_text": text.text, "out": folder}))'
          " or self.config,"),
    Fault("of a line's two lengths one is taken", "jobs/batch.py", f"{MANY}::test_bad_lines_are_named_at_the_start",
          "if len(given) > len(own):", "if not own:"),
    Fault("a line's own seed is not read", "jobs/batch.py", MANY, '            "seed",\n', ""),
    Fault("a text that was begun is taken for finished", "jobs/batch.py",
          f"{MANY}::test_a_kill_at_any_moment_leaves_exactly_the_rest",
          'read_record(self.folder).state == FINISHED', "True"),
    Fault("seconds of prefill that are no numbers are read", "jobs/folder.py", "cli/test_all_bad_inputs.py",
          "sum(seconds, record.prefill_seconds or 0.0)", "sum(seconds)"),
    Fault("a recorded drafting option that none has is passed over", "jobs/config.py", "cli/test_all_bad_inputs.py",
          "        DraftOptions(**of_json(drafting))  # a name that none has is refused\n", ""),
    Fault("another file goes on with a folder", "jobs/batch.py", MANY, 'if known["sha256"] != digest:', "if False:"),
    # compiled libraries, and paths
    Fault("a library is loaded whatever its content", "native_build.py", BUILDING,
          "if _hash_file(file).read_bytes() == _hash(file):", "if True:"),
    Fault("a library is loaded from a folder of anybody's", "files.py", BUILDING,
          "return bool(private and stays) and os.access(folder, os.W_OK)", "return os.access(folder, os.W_OK)"),
    Fault("a library is named before it is on the disk", "native_build.py", BUILDING,
          "os.fsync(written.fileno())", "written.fileno()"),
    Fault("heads that come with tswift hide installed ones", "speculators/heads_files.py", "test_found_heads.py",
          "for folder in (cache_folder(), BUNDLED)", "for folder in (BUNDLED, cache_folder())"),
    Fault("heads that come with tswift are not told", "speculators/heads_files.py", "test_found_heads.py",
          "return heads.parent in (cache_folder(), BUNDLED)", "return heads.parent == cache_folder()"),
    Fault("auto never drafts one token", "drafting/methods.py", "drafting/test_adaptive.py",
          'arms["medusa, one token"] =', "_ ="),
    Fault("a missing compiler is not told", "loading/model.py", BUILDING,
          'cost = "many" if plan.coded', 'return None\n        cost = "many" if plan.coded'),
    Fault("a missing compiler is told after loading", "loading/model.py", BUILDING,
          "    slow = _slowness(plan)\n", "    _load_network(plan)\n    slow = _slowness(plan)\n"),
    Fault("floats go on with a run of integers", "jobs/resuming.py", "cli/test_integer_weights.py", 'if own is not None and own != then:', "if False:"),
    Fault("floats judge a run of integers", "jobs/verification.py", "cli/test_integer_weights.py", "    refuse_other_products(run, model)\n", ""),
    Fault("floats of codes are passed over as exact", "forward/exact_passes.py", "forward/test_integers.py", "or multiplies_integers(target.model)", "or holds_codes(target.model)"),
    Fault("floats take all memory", "forward/cpu/products.py", "forward/test_integers.py", "if end * _FLOAT <= most]", "if True]"),
    Fault("Zig keeps objects where others may write", "native_build.py", BUILDING, "env={**os.environ, **caches}", "env={**caches, **os.environ}"),
    Fault("what lies in the folder of a command is run for Zig", "native_build.py", BUILDING, '_ZIG = ("-P", ', "_ZIG = ("),
    Fault("a slow compiler is run again", "native_build.py", BUILDING, " and not isinstance(error, _Outlasted)", ""),
    Fault("a missing compiler is told of nobody", "cli/output.py", "cli/test_output.py",
          "if category is not SlowWarning:", "if True:"),
    Fault("what stands in for kernels is not told", "forward/notes.py", "forward/test_adapting.py::test_kernels_that_fail_are_told_once_and_those_that_nobody_wrote_are_not",
          "    if new:\n        faults", "    if False:\n        faults"),
    Fault("what stands in for kernels is told again and again", "forward/notes.py", "forward/test_adapting.py::test_kernels_that_fail_are_told_once_and_those_that_nobody_wrote_are_not",
          "if reason not in told", "if True"),
    Fault("what nobody wrote is told as a fault", "forward/notes.py", "forward/test_adapting.py::test_kernels_that_fail_are_told_once_and_those_that_nobody_wrote_are_not",
          "and not isinstance(reason, NoFault)", "and reason"),
    Fault("a capture that fails is told of nobody", "decoding/device_step.py", "cuda/test_capture.py::test_a_capture_that_fails_is_told_before_the_first_step",
          "            warn_of_fallbacks(each)", "            pass"),
    Fault("a program that does not compile takes the model with it", "loading/plan.py", "cli/test_output.py",
          "        library()\n        return True\n    return False", "        pass\n    return True"),
    Fault("a method that needs heads is offered without", "drafting/methods.py", "test_api.py",
          'if "heads" in method.needs and not heads:', "if False:"),
    Fault("a model names methods that need a smaller one", "drafting/methods.py", "test_api.py",
          'if method.reference or ("draft_model" in method.needs and not draft):', "if method.reference:"),
    Fault("a home folder that the shell left is no home folder", "errors.py", "cli/test_app.py",
          "path = Path(name).expanduser()", "path = Path(name)"),
    Fault("bounds leave out what layers have added", "forward/cpu/kv_bounds.py", f"{PROGRAM}::test_integers_show_what_is_broken",
          "for each in added if norm is None else", "for each in () if norm is None else"),
    # weights as codes
    Fault("a wrong minimum", "forward/cpu/products.c", INTEGERS,
          "plus(total[h][r], minimum, spread(sums[r]))", "plus(total[h][r], scale, spread(sums[r]))"),
    Fault("a block's scale is the next one's", "forward/cpu/products.c", INTEGERS,
          "at + coded + h * tail / HALVES;", "at + coded + h * tail / HALVES + (b + 1 < blocks ? size : 0);"),
    Fault("rounded inputs of another row's step", "forward/cpu/products.c", INTEGERS,
          "scale * spread(steps[r])", "scale * spread(steps[0])"),
    Fault("a code is not cut out of its neighbours", "vectors.h", INTEGERS,
          "shifted & (uint16_t)((1 << bits) - 1)", "shifted"),
    Fault("a long chain forgets what is before its part", "forward/cpu/program.c", INTEGERS,
          "Attention a = attention(m, p, first, some, l->window);",
          "Attention a = attention(m, p, 0, some, l->window);"),
    Fault("embeddings of a token's neighbour", "forward/cpu/program.c", INTEGERS,
          "own = token % GROUP;", "own = (token + 1) % GROUP;"),
    # parts of a program, windows and soft caps
    Fault("a window is a token too wide", "attention/native.c", NATIVE,
          "most(c->prefix + depth(c, node) - c->window + 1, 0)", "most(c->prefix + depth(c, node) - c->window, 0)"),
    Fault("blocks at a window's edge are seen whole", "attention/native.c", NATIVE,
          "        if (first < w->unseen) b.shown = 0;\n", ""),
    Fault("a soft cap is that of powers of two", "attention/native.c", f"{NATIVE}::test_windows_and_soft_caps",
          "c->softcap * 1.442695041f", "c->softcap"),
    Fault("all layers turn alike", "forward/cpu/parts.py", f"{PROGRAM}::test_a_pass_is_the_modeling_codes",
          "return self._names.index(name)", "return 0"),
    Fault("what layers add has no factor", "forward/cpu/program.c", f"{PROGRAM}::test_a_pass_is_the_modeling_codes",
          "state[i] += m->residual_scale * put[i]", "state[i] += put[i]"),
    # recurrent layers
    Fault("the state of the sibling", "forward/cpu/recurrence.c", RECURRENT,
          "from[node] = parent < 0 ? 0 : to[parent];", "from[node] = node ? to[node - 1] : 0;"),
    Fault("a program convolves with the slots before", "forward/cpu/program.c", f"{PROGRAM} {RECURRENT}",
          "int64_t node = run->parents[row], behind", "int64_t node = row - 1, behind"),
    Fault("a program's gates are another row's", "forward/cpu/program.c", PROGRAM,
          "*gate = mixed(run, row) + m->channels", "*gate = mixed(run, 0) + m->channels"),
    Fault("a program's states go on by what was forwarded first", "forward/cpu/program.py", RECURRENT,
          "accepted = mixed[:, list(nodes)]", "accepted = mixed[:, : len(nodes)]"),
    Fault("attention is let through by its queries", "forward/cpu/program.c", PROGRAM,
          "(2 * h + 1) * width", "2 * h * width"),
    Fault("a convolution reads the slots before", "forward/recurrent.py", RECURRENT,
          "torch.where(seen, places, -1)", "torch.where(places <= places[before:, None], places, -1)"),
    Fault("a state goes on by a node too many", "forward/recurrent.py", RECURRENT,
          "step_states(rows, state, nodes, range(-1, len(nodes) - 1), state)",
          "step_states(rows, state, range(nodes[-1] + 1), range(-1, nodes[-1]), state)"),
    Fault("the gates of another row", "forward/cpu/recurrence.c", RECURRENT, "w->decays[rank]", "w->decays[head]"),
    Fault("the rows before a convolution are those forwarded last", "forward/recurrent.py", RECURRENT,
          "own[list(nodes)]", "own[: len(nodes)]"),
    Fault("an MTP head reads states before embeddings", "speculators/mtp.py", MTP,
          "self.eh_proj(torch.cat(parts, -1))", "self.eh_proj(torch.cat(parts[::-1], -1))"),
    Fault("a drafter's cache takes no more than it uses", "speculators/window_layers.py", "forward/test_stand_ins.py",
          "layer: int, *_: object, **__: object", "layer: int"),
    Fault("an MTP head sees beyond its window", "speculators/mtp.py", MTP,
          "seen & near(position, window, kv) if window else seen", "seen"),
    Fault("an expert's gate is what it lets through", "speculators/mtp_files.py", MTP,
          '("gate_proj", "up_proj")', '("up_proj", "gate_proj")'),
    Fault("an MTP head's last row does not see itself", "drafting/networks.py", MTP,
          """        slots = given["slots"][new]
        self.kv.hold(slots)
""", """        slots = given["slots"][new]
"""),
    Fault("a state is not taken back", "caches.py", RECURRENT,
          "if self.states is not None and mark.states is not None:", "if False:"),
    Fault("weights that have no place are left out", "forward/cpu/parts.py", ARCHITECTURES,
          "if id(weight) not in known:", "if False:"),
    Fault("a program is tried at the beginning of a text alone", "forward/adapting.py", ARCHITECTURES,
          "for place, at in expected.items())", "for place, at in expected.items() if not place)"),
    Fault("embeddings of packed floats are a neighbour's", "forward/cpu/program.c", FLOATS,
          "pair = place - both + both % LANES * 2 + both / LANES", "pair = place"),
    Fault("packed matrices are no part of a model's hash", "models/hashes.py", FLOATS,
          "own = [(f\"{path}.weight\", packed)] if is_packed_floats(packed) else []", "own = []"),
    Fault("C products that are wrong are not seen", "loading/packing.py", FLOATS,
          "if not near and wanted.isfinite().all():", "if False:"),
    Fault("weights that lose digits are packed in 16 bits", "forward/cpu/products.py", FLOATS,
          "else next(narrow, torch.float32)", "else torch.bfloat16"),
    Fault("packed embeddings have no factor", "forward/cpu/products.py", FLOATS,
          "return (self.packed.rows(tokens) * scale).to(self.dtype)", "return self.packed.rows(tokens).to(self.dtype)"),
    # GGUF files
    Fault("rows of codes are the first of their groups", "models/codes.py", "forward/test_integers.py",
          "each[outputs // _GROUP, :, :, outputs % _GROUP]", "each[outputs // _GROUP, :, :, 0 * outputs]"),
    Fault("rows of queries and keys stay as llama.cpp has them", "models/gguf.py", GGUF,
          "if heads is not None and self.architecture.permuted:", "if False:"),
    Fault("the minimum of a block of Q4_K is added", "models/gguf.py", GGUF,
          "blocks[:, 16:], 4, 32), _half(blocks, 0) * scale, -(",
          "blocks[:, 16:], 4, 32), _half(blocks, 0) * scale, ("),
    Fault("the high bits of Q6_K are those of the block before", "models/gguf.py", GGUF,
          "_fields(qh, 2, 32) << np.uint8(4), scale", "np.roll(_fields(qh, 2, 32), 32, 1) << np.uint8(4), scale"),
    Fault("a tensor may end behind its file", "models/gguf.py", GGUF,
          "if there.start + there.bytes > len(header.data):", "if there.start > len(header.data):"),
    Fault("norms of Gemma multiply by one more than a file says", "models/gguf.py", f"{GGUF}::test_the_model_is_that_of_the_dequantised_weights",
          "weight = weight - 1", "weight = weight - 0"),
    Fault("windows of Gemma 3 turn as all its layers do", "models/gguf.py", f"{GGUF}::test_the_model_is_that_of_the_dequantised_weights",
          '(f"{prefix}rope.freq_base_swa", _NEAR)', '(f"{prefix}rope.freq_base", _NEAR)'),
    Fault("a way to cut text into words that is not known is as good as another", "models/gguf_tokenizer.py", TOKENIZER,
          "if pre not in SPLITS:", "pre = pre if pre in SPLITS else 'gpt-2'\n    if False:"),
    Fault("digits are one word", "models/gguf_tokenizer.py", TOKENIZER,
          '_DIGIT = r"\\p{N}"', '_DIGIT = r"\\p{N}+"'),
    Fault("control tokens are text where no byte has their letters", "models/gguf_tokenizer.py", TOKENIZER,
          "if kind in _WHOLE or", "if kind in _WHOLE and token.isascii() or"),
    Fault("a run goes on with another tokenizer", "jobs/resuming.py", "jobs/test_resume.py::test_another_tokenizer_is_refused",
          'get("tokenizer", model.tokenizer_hash) != model.tokenizer_hash', 'get("tokenizer") is False'),
    Fault("kept codes are those of any checkpoint", "loading/packing.py", GGUF,
          "{status.st_mtime_ns}", "{0}"),
    # what is remembered of a model
    Fault("checks of another model's weights are recalled", "loading/model.py", REMEMBERED,
          "about = weights, config_hash", "about = config_hash"),
    Fault("checks by other sources are recalled", "remembered.py", REMEMBERED,
          "_processor(), _sources()", "_processor()"),
    Fault("kernels that failed pass the next time", "checking.py", CHECKING,
          "if KERNELS[what] == _PASSED:", "if True:"),
    Fault("kernels by another driver are recalled", "checking.py", CHECKING,
          "torch.version.cuda, driver_version(), compilers", "torch.version.cuda, compilers"),
    Fault("kernels of other sizes are recalled", "checking.py", CHECKING,
          "what = (name, *map(str, (device, *asked)))", "what = (name, str(device))"),
    Fault("logits that failed are recalled as right", "forward/adapting.py", REMEMBERED,
          "    if target.runner.program is not None and not target.fallbacks:", "    if True:"),
    # the KV cache's dtype
    Fault("16-bit keys are cut, not rounded", "forward/cpu/program.c", PROGRAM,
          "(bits + 0x7fff + (bits >> 16 & 1)) >> 16", "bits >> 16"),
    Fault("a run goes on over another cache", "jobs/resuming.py", f"{KV_DTYPE}::test_the_bundled_models_runs",
          "if own != config.model.kv_dtype:", "if False:"),
    Fault("a run is judged over another cache", "jobs/verification.py", KV_DTYPE,
          "return kept if there and kept != config.dtype else dtype", "return dtype"),
    Fault("the reference reads unrounded keys", "caches.py", KV_DTYPE,
          "kind = self.rounds_to or self.dtype", "kind = self.dtype"),
    Fault("passes of the program are not exact by default", "forward/exact_passes.py", f"{KV_DTYPE}::test_a_run_from_before_there_was_a_choice_keeps_the_models_own",
          'or target.device.type == "cuda"\n            or target.runner.program is not None', 'or target.device.type == "cuda"'),
    # other processors
    Fault("sums go backwards on AVX2 alone", "forward/cpu/products.c", f"{PROGRAM}::test_avx2_has_the_bits_of_avx512",
          "at + i * BLOCK * size, input + i, inputs, INPUTS",
          "at + (LANES == 8 ? inputs - 1 - i : i) * BLOCK * size, input + (LANES == 8 ? inputs - 1 - i : i), inputs, 1"),
    Fault("a group's second half has the codes of the first on AVX2 alone", "forward/cpu/products.c", f"{INTEGERS}::test_a_product_has_the_bits_of_its_definition",
          "load_integers(codes + h * LANES * 4)", "load_integers(codes)"),
    Fault("integer values are packed with those of other dimensions", "vectors.h", NATIVE,
          "(from[k] + at)), 0xd8)", "(from[k] + at)), 0xe4)"),
    Fault("sums are rounded twice on AVX2 alone", "vectors.h", f"{PROGRAM}::test_avx2_has_the_bits_of_avx512",
          "return X86(fmadd_ps)(x, y, sum);", "return LANES == 8 ? sum + x * y : (vector)X86(fmadd_ps)(x, y, sum);"),
    Fault("lanes are added up in another order on ARM", "vectors.h", "test_vectors.py::test_c_programs_have_the_bits_of_an_x86_processor",
          "return vextq_f32(x, x, 2);", "return vrev64q_f32(x);"),
    Fault("a job of the parent's is thought to be the forked child's", "pool.c", NATIVE,
          "busy == own ||", "busy ||"),
    Fault("codes of 8 bits are not moved back on ARM", "vectors.h", "test_vectors.py::test_c_programs_have_the_bits_of_an_x86_processor",
          "bits == 8 ? inputs * 128 : 0", "0"),
    Fault("all inputs of floats are the first of four on ARM", "forward/cpu/products.c", "test_vectors.py::test_c_programs_have_the_bits_of_an_x86_processor",
          "spread(load(own)[i])", "spread(load(own)[0])"),
    Fault("an ARM processor is given flags of x86", "native_build.py", BUILDING,
          '"aarch64": ("-mno-outline-atomics",)', '"aarch64": ("-mno-outline-atomics", "-mavx2")'),
    # CUDA: captures, prompts, what is fetched
    Fault("the spare slot is set by a copy from the host", "caches.py",
          "cuda/test_device.py::test_a_step_writes_the_hosts_text_and_asks_for_no_more_than_it_has_to",
          "self.held[self.budget : self.budget + 1].fill_(False)", "self.held[self.budget] = False"),
    Fault("why a capture failed is lost", "forward/cuda/graphs.py", "cuda/test_capture.py",
          "self.failure = cause_of(error) + _SPOILED", "pass"),
    Fault("programs that wait are captured", "forward/cuda/graphs.py", "cuda/test_capture.py",
          'torch.cuda.set_sync_debug_mode("error")', "pass"),
    Fault("captures are tried after one has failed", "forward/cuda/graphs.py", "cuda/test_capture.py",
          "if self.spoiled:\n            return run", "if False:\n            return run"),
    Fault("a round is captured where passes are not replayed", "drafting/networks.py", TREES_OF,
          "self._target.capture(run) if self._target.replays else run",
          "self._target.capture(run)"),
    Fault("what was generated is taken for the prompt", "decoding/loop.py", WIDE_CHUNKS,
          "self._kv, self._prompt - 1)", "self._kv)"),
    Fault("the audit takes all for the prompt", "decoding/audit.py", WIDE_CHUNKS,
          "for forwarded in chunks(target, part, kv, prompt)", "for forwarded in chunks(target, part, kv)"),
    Fault("a prompt's last chunk is part of the text", "decoding/loop.py", WIDE_CHUNKS,
          "self._kv, self._prompt - 1)", "self._kv, self._prompt - 90)"),
    Fault("a digest's log-probabilities are logits", "drafting/history.py", "drafting/test_history.py",
          "(best.values - scales).double()", "best.values.double()"),
    Fault("a digest has banned tokens", "drafting/history.py", "drafting/test_history.py",
          "known = bias(known.where(known.isfinite(), -inf), self._params, self._constants)",
          "known = known.where(known.isfinite(), -inf)"),
    # what nobody asked for
    Fault("a chat is sampled as in the paper", "jobs/job.py", "cli/test_generate.py",
          "(usual_source(own) if config.chat else PAPERS)", "PAPERS"),
    Fault("the model's own sampling goes before what was typed", "jobs/config.py", "cli/test_generate.py",
          "for name, value in typed.items() if name in self.given}", "for name, value in typed.items() if False}"),
    Fault("a run without a seed goes on with another", "jobs/config.py", "jobs/test_config.py",
          "names = (*_RECORDED, *options)", "names = (*options,)"),
    Fault("heads that nobody uses are loaded", "jobs/config.py", "jobs/test_config.py",
          "    for name in LOADED:\n", "    for name in LOADED[1:]:\n"),
    Fault("temperature 0 keeps the paper's penalty", "sampling/parameters.py", "cli/test_generate.py",
          "usual if temperature else 1.0", "usual"),
    Fault("a model that recommends nothing is sampled as in the paper", "sampling/generation_config.py",
          "cli/test_generate.py serving/test_service.py", "else LLAMA_CPPS\n", "else PAPERS\n"),
    Fault("the server samples as in the paper", "serving/service.py", "serving/test_service.py",
          '{"sampling_from": usual, **typed}', "dict(typed)"),
    Fault("a typed length gives way", "jobs/job.py", "cli/test_defaults.py::test_generate_ends_where_the_model_does",
          '"length" not in config.given', "True"),
    Fault("a grid that was typed gives way", "benchmarking/config.py", "cli/test_defaults.py",
          'if "lens" not in given:', "if True:"),
    # a step
    Fault("a commit's gather is skipped", "caches.py", LOOP,
          "if list(slots) != list(range(count)):", "if False:"),
    Fault("the wrong row is committed", "decoding/loop.py", LOOP,
          ".kv.commit(walked.path)", ".kv.commit([*walked.path[:-1], 0])"),
    Fault("the root's position for all nodes", "decoding/loop.py", LOOP,
          "context.position + depth for", "context.position for"),
    Fault("positions of drafted nodes are off by one", "decoding/loop.py", LOOP,
          "context.position + depth for", "context.position + depth + (depth > 0) for"),
    Fault("a node sees all nodes of the tree", "decoding/loop.py", LOOP,
          "= tree.ancestors()", "= tree.ancestors().fill_(True)"),
    Fault("the tree's mask lets a sibling through", "decoding/drafter.py", LOOP,
          "row[node] = 1", "row[node] = row[node - 1] = 1"),
    Fault("the root's noise for all nodes", "sampling/rule.py", LOOP,
          "self.draw(logits, seen, places.tolist())", "self.draw(logits, seen, places[:1].tolist() * len(places))"),
    Fault("the penalty overlooks drafted ancestors", "decoding/loop.py", LOOP,
          "draw_nodes(logits, nodes, parents, with_runner_up)",
          "draw_nodes(logits, (tokens, positions, torch.eye(len(tree), dtype=torch.bool)), parents, with_runner_up)"),
    Fault("the drawn path goes on below another node", "sampling/sampler.c", "sampling/test_sampler_c.py",
          "parents[node] == at && ", ""),
    Fault("the root's noise for all of the drawn path", "sampling/sampler.c", "sampling/test_sampler_c.py",
          "noisy ? c->positions[row] + c->ahead", "noisy ? c->positions[0] + c->ahead"),
    Fault("the token drawn at the root ends every path", "decoding/loop.py", LOOP,
          "+ [drawn[path[-1]]]", "+ [drawn[path[0]]]"),
    Fault("plain steps are not taken back", "decoding/loop.py", DEVICE,
          "            kv.rewind(mark)", "            kv.length = mark.length + 1"),
    Fault("a resumed text forgets its first token", "decoding/loop.py", LOOP,
          "[*prompt, *written]", "[*prompt, *written[1:]]"),
    Fault("a draft that overflows is a fault of the model", "decoding/step.py", "decoding/test_finite.py",
          "if not walked.path and (root :=", "if False and (root :="),
    Fault("what is behind a stop counts as accepted", "decoding/step.py", STOPS,
          "min(len(walked.path) - 1, len(kept))", "len(walked.path) - 1"),
    # on the device
    Fault("on the device a commit's gather is skipped", "attention/sdpa.py", DEVICE,
          "theirs.index_select(2, places)", "theirs.index_select(2, slots)"),
    Fault("on the device the wrong row is kept for the heads", "decoding/device_tree.py", DEVICE,
          "state.last.copy_(last)", "state.last.zero_()"),
    Fault("on the device a path may be one token too long", "decoding/device_tree.py", DEVICE,
          "(depths < max_new)", "(depths <= max_new)"),
    Fault("on the device ancestors end too early", "decoding/device_tree.py", DEVICE,
          "<= min(depth, len(index) - 1):", "<= min(depth, len(index) - 1) // 2:"),
    Fault("on the device noise is shifted by one", "sampling/rule.py", DEVICE,
          "ancestors), positions + 1)", "ancestors), positions)"),
    Fault("on the device the cache's length stays", "decoding/device_tree.py", DEVICE,
          "    state.length.add_(kept[0])\n", ""),
    Fault("on the device the root stays", "decoding/device_tree.py", DEVICE,
          "torch.where(kept > 0, drawn[last], state.tokens[:1])", "state.tokens[:1]"),
    Fault("on the device the penalty's window stays", "decoding/device_tree.py", DEVICE,
          "    sampler.extend_rows(emitted, state.position + 1 + steps, kept)\n", ""),
    Fault("the walking kernel forgets the token behind the path", "decoding/device_tree_triton.py", WALK,
          "tl.atomic_max(newest + tl.maximum(new, 0), place + count, mask=count > 0)", "pass"),
    Fault("a draft goes before the selection it is to read", "drafting/fixed_tree.py", DEVICE,
          "kv.room >= 2 * most", "True"),
    Fault("a draft overwrites logits that are wanted", "decoding/device_step.py", DEVICE,
          "or not self._drafter.device_drafts_on\n            or self._context.recorder is not None",
          "or not self._drafter.device_drafts_on"),
    Fault("a later capture writes over the text", "forward/cuda/graphs.py", "cuda/test_capture.py",
          "            self._length.fill_(length)\n            self._run", "            self._run"),
    Fault("the device drafts on although another arm is due", "drafting/adaptive.py", "drafting/test_adaptive.py",
          "not self._trial\n            and self._unsettled < _LEARNT_TOGETHER - 1\n            and self._steps != _STEPS_BEFORE_TRIALS - 1", "True"),
    Fault("a plain step's answer is overwritten before it is read", "decoding/device_step.py", DEVICE,
          "        for _ in range(2)\n    ]", "        for _ in range(1)\n    ]"),
    Fault("plain steps aside know of a token to come", "decoding/loop.py", f"{DEVICE}::test_plain_steps_in_between_leave_no_trace",
          "        if self._stepper is not None and self._stepper.runs_ahead:", "        if False:"),
    Fault("a plain step is launched beyond the text's length", "decoding/device_step.py", DEVICE,
          "elif self.runs_ahead and proposed.more:", "elif self.runs_ahead:"),
    Fault("the walking kernel follows nodes that are not there", "decoding/device_tree_triton.py", WALK + "::test_kernels_that_lie_are_not_used",
          "((token == after) & (token >= 0))", "(token == after)"),
    Fault("the kernel of ancestors stops below the root", "decoding/device_tree_triton.py", WALK,
          "for _ in range(depth):", "for _ in range(depth - 1):"),
    Fault("the walking kernel leaves the root", "decoding/device_tree_triton.py", WALK,
          "tl.store(tokens, new, mask=count > 0)", "tl.store(tokens, new, mask=count > 99)"),
    Fault("a walk's mask is one that triton 3.9 refuses", "decoding/device_tree_triton.py", WALK,
          "on_path & (depth > tl.where(count > 0, 0, STEPS))", "on_path & (depth > 0) & (count > 0)"),
    Fault("a check passes what is no number", "checking.py", CHECKING,
          "not ((apart <= allowed[0]) | (one == other)).all()", "(apart > allowed[0]).any()"),
    Fault("a check passes a row for many", "checking.py", CHECKING,
          "allowed and one.shape == other.shape", "allowed"),
    Fault("a check looks at the first of several alone", "checking.py", CHECKING,
          "in zip(ours, plain, strict=True):", "in [*zip(ours, plain, strict=True)][:1]:"),
    Fault("what steps leave is compared with itself", "decoding/device_step_check.py", DEVICE,
          "torch.zeros_like(apart), shape.rounding", "apart, shape.rounding"),
    Fault("walking kernels are used untried", "decoding/device_tree_check.py", "decoding/test_device_tree.py::test_kernels_that_lie_are_not_used",
          'kernel_fault("trees", tried, device)', 'kernel_fault("trees", [], device)'),
    # the sampling rule
    Fault("noise is a tenth too small", "sampling/rule.py", RULE,
          "return -torch.log(", "return -0.9 * torch.log("),
    Fault("noise is shifted by one position", "sampling/rule.py", RULE,
          "(positions + 1) * _signed", "(positions + 2) * _signed"),
    Fault("the penalty's window is one too long", "sampling/rule.py", RULE,
          "(positions - window)", "(positions - window - 1)"),
    Fault("the window of drafted tokens is one too long", "sampling/rule.py", RULE,
          "- positions < window)", "- positions <= window)"),
    Fault("min-p goes before the penalty", "sampling/parameters.py", RULE,
          "    if seen is not None:\n        logits",
          "    if params.min_p and params.temperature:\n"
          "        logits = _keep_min_p(logits, params.min_p)\n"
          "    if seen is not None:\n        logits"),
    Fault("transformers' generate gets tswift's order of filters", "sampling/generation_config.py", GENERATE,
          "replace(params, order=_ORDER) if matters else params", "params"),
    Fault("its penalty looks back on some tokens only", "sampling/parameters.py", f"{GENERATE}::test_greedy_is_that_of_transformers",
          "penalty=penalty, window=ALL", "penalty=penalty, window=20"),
    Fault("changed weights go unseen by it", "custom_generate.py", f"{GENERATE}::test_changes_of_the_model_are_seen",
          "_ADOPTED[model][0] != state", "False"),
    Fault("its threads do not take turns", "custom_generate.py", GENERATE,
          "        with turn:\n            step", "        if turn:\n            step"),
    Fault("it decodes in the model's own modules", "custom_generate.py", GENERATE,
          "return deepcopy(model, shared)", "return model"),
    Fault("top-p goes before top-k", "sampling/parameters.py", RULE,
          "for name in params.filters:", "for name in sorted(params.filters, key=lambda name: name != 'top_p'):"),
    Fault("eta's threshold lacks its root", "sampling/parameters.py", RULE,
          "math.sqrt(epsilon) * (-", "epsilon * (-"),
    Fault("top-k drops ties", "sampling/parameters.py", RULE,
          "logits < logits.topk(top_k).values[:, -1:]",
          "logits.ge(math.inf).logical_not().scatter(1, logits.topk(top_k).indices, False)"),
    Fault("a filter that an order does not name is left out", "sampling/parameters.py", GENERATE,
          ", *_FILTERS])", "] or _FILTERS)"),
    Fault("parameters that are exchanged draw as the first ones", "sampling/rule.py", RULE,
          "self._rule = self._rules[params]", "self._rule = next(iter(self._rules.values()))"),
    Fault("exchanged parameters keep the C program of others", "sampling/rule.py", RULE,
          "return c_sampler(self.params,", "return c_sampler(SamplingParams(),"),
    Fault("what was typed with its default is let through", "benchmarking/config.py", "benchmarking/test_run.py",
          "given_options(self.drafting, self.given)", "given_options(self.drafting)"),
    Fault("a bias is added twice", "sampling/parameters.py", RULE,
          "    bias(logits, params, held)\n", "    bias(bias(logits, params, held), params, held)\n"),
    Fault("the C rule forgets biases", "sampling/sampler.c", "sampling/test_sampler_c.py",
          "w[place] += c->bias[i]", "w[place] += 0"),
    Fault("noise is of a draft's places, not of its tokens", "sampling/sampler.c", PROGRAM,
          "c->ids ? c->ids[row * c->by_ids + c->kept[i]] : c->kept[i]", "c->kept[i]"),
    Fault("other tokens than the draft's are penalised", "sampling/sampler.c", PROGRAM,
          "mask[t] = newest[c->ids[t]] > from", "mask[t] = newest[t] > from"),
    Fault("other tokens than the draft's are banned", "sampling/sampler.c", PROGRAM,
          "c->banned[c->ids ? c->ids[t] : t]", "c->banned[t]"),
    Fault("drafts have other tokens' logits", "speculators/heads.py", "speculators/test_draft_head.py",
          "logits.index_copy_(-1, self._places, drafted)", "logits.index_copy_(-1, self._places - 1, drafted)"),
    Fault("codes of a draft vocabulary are rounded once more", "speculators/heads.py", "speculators/test_draft_head.py",
          "PackedLinear(lm_head.packed.chosen(self._places), bias, DRAFT_BITS)",
          "rounded_linear(lm_head_rows(lm_head, self._places, target.dtype))"),
    Fault("the kernels forget biases", "sampling/sampler_triton.py", "sampling/test_sampler_triton.py",
          "logit + tl.load(bias + ids", "logit + 0 * tl.load(bias + ids"),
    Fault("padding is stored", "forward/cuda/layer_kernels.py", "forward/test_fused_layers.py",
          "stored = (used & (row < nodes) & (slot < capacity))", "stored = (used & (slot < capacity))"),
    Fault("keys are stored from slot 0 on", "forward/cuda/layer_kernels.py", "forward/test_fused_layers.py",
          "row.to(tl.int64) + tl.load(length).to(tl.int64)", "row.to(tl.int64)"),
    Fault("a sum is not rounded before its norm", "forward/cuda/layer_kernels.py", "forward/test_fused_layers.py",
          "        numbers = _rounded(numbers, kind, INTERPRETED)\n        tl.store(total + row * SIZE + places", "        tl.store(total + row * SIZE + places"),
    Fault("squares are those of a sum that is not rounded", "forward/cuda/layer_kernels.py", "forward/test_fused_layers.py",
          "        numbers = _rounded(numbers, kind, INTERPRETED)\n        tl.store(total + row * SIZE + outputs", "        tl.store(total + row * SIZE + outputs"),
    Fault("a product's sums are made before all parts are there", "forward/cuda/layer_kernels.py", "forward/test_fused_layers.py",
          "== PARTS - 1", "== PARTS - 2"),
    Fault("a product counts from where the last one stopped", "forward/cuda/layer_kernels.py", "forward/test_fused_layers.py",
          "            tl.store(counter, 0)  # for the next product\n", "            pass\n"),
    Fault("a norm that is read is not rounded before its weight", "forward/cuda/layer_kernels.py", "forward/test_fused_layers.py",
          "scaled = _rounded(taken.to(tl.float32) * roots[None, :], kind, INTERPRETED)", "scaled = taken.to(tl.float32) * roots[None, :]"),
    Fault("nodes that were not accepted are appended", "attention/triton.py", KERNEL,
          "held = dims < tl.where(step < kept, HEAD, 0)", "held = dims < HEAD"),
    Fault("a partial cache's length shrinks", "attention/triton.py", KERNEL,
          "tl.store(length, tl.maximum(tl.load(length), reached.to(tl.int32)))",
          "tl.store(length, reached.to(tl.int32))"),
    Fault("a block of rows reads behind the last node", "attention/triton.py", KERNEL,
          "prefix + tl.minimum((first + ROWS - 1) // GROUPS, nodes - 1)", "prefix + (first + ROWS - 1) // GROUPS"),
    Fault("a value's step is left out", "attention/triton.py", CODES,
          "weights * _held_steps(value_steps + slots, held)[None, :]", "weights * 1.0"),
    Fault("a step is a product on a device", "caches.py", f"{CODES}::test_steps_are_quotients_on_a_device_too",
          "largest / torch.full_like(largest, _MOST_8)", "largest / torch.tensor(float(_MOST_8))"),
    Fault("codes are cut off", "attention/triton.py", CODES, "counts + 12582912.0 - 12582912.0", "counts"),
    Fault("an accepted node's steps stay where they were", "caches.py", f"{CODES}::test_every_method_writes_the_text_of_plain_decoding",
          "list(zip(self.buffers[::2], self.buffers[1::2], strict=True))", "list(zip(self.buffers[:2:2], self.buffers[1:2], strict=True))"),
    Fault("a selection takes codes alone", "caches.py", f"{CODES}::test_a_selection_takes_codes_and_their_steps",
          "zip(self.parts[layer], full.parts[layer], strict=True)", "zip(self.parts[layer][:2], full.parts[layer][:2], strict=True)"),
    Fault("codes are kept by kernels untried", "forward/adapting.py", CODES,
          "target.kv_shape.steps_behind and _doubted(target)", "False"),
    Fault("a branch's state is not kept", "forward/cuda/recurrence_triton.py", "forward/test_recurrence_triton.py",
          "        if target >= 0:\n", "        if target > 0:\n"),
    Fault("a root's second child goes on from the first", "forward/cuda/recurrence_triton.py",
          "forward/test_recurrence_triton.py", "if source == _COMMITTED:", "if source == _HERE:"),
    Fault("on the device a state goes on from the node before", "forward/cuda/recurrence_triton.py",
          "forward/test_recurrence_triton.py", "here = parents == index - 1", "here = index > 0"),
    Fault("on the device a branch's state is not kept", "forward/cuda/recurrence_triton.py",
          "forward/test_recurrence_triton.py", "index.where(far, -1)", "index.where(far & here, -1)"),
    Fault("on the device states go on by a node too many", "forward/recurrent.py", "cuda/test_capture.py",
          "kernel.step_path(rows, state, plan, count)", "kernel.step_path(rows, state, plan, None if count is None else count + 1)"),
    Fault("on the device states go on by all nodes", "forward/recurrent.py", "cuda/test_capture.py",
          "kernel.step_path(rows, state, plan, count)", "kernel.step_path(rows, state, plan, None)"),
    Fault("on the device a convolution goes on by what was forwarded", "forward/recurrent.py", "cuda/test_capture.py",
          ".index_select(1, nodes)], 1)", "[:, : len(nodes)]], 1)"),
    Fault("on the device nothing of a pass goes on", "decoding/device_step.py", "cuda/test_capture.py",
          "kv.states.commit_path(path.nodes[steps], path.count)", "pass"),
    Fault("states move away from the programs that read them", "caches.py", "cuda/test_capture.py",
          "elif self.stay:", "elif False:"),
    Fault("a step ahead of the host changes states", "decoding/device_step.py", "cuda/test_capture.py",
          "            and self._kv.states is None\n", ""),
    Fault("passes with states are captured by a kernel untried", "forward/recurrent.py",
          "forward/test_recurrence_triton.py", " or kernel_fault(device) is not None:\n        return None\n    from", ":\n        return None\n    from"),
    Fault("a product's parts are not rounded", "forward/cuda/layer_kernels.py", "forward/test_fused_layers.py",
          "        numbers = _rounded(numbers, kind, INTERPRETED)\n    return", "    return"),
    Fault("a product's last part is left out", "forward/cuda/layer_kernels.py", "forward/test_fused_layers.py",
          "tl.static_range(1, PARTS)", "tl.static_range(2, PARTS)"),
    Fault("every part of a product adds the bias", "forward/cuda/layer_kernels.py", "forward/test_fused_layers.py",
          "            if part + index == 0:\n", "            if part + index >= 0:\n"),
    Fault("a product of many rows is its last part", "forward/cuda/layer_kernels.py", "forward/test_fused_layers.py",
          "tl.where(index == 0, total, whole + total)", "total"),
    Fault("products of wide passes are PyTorch's", "forward/cuda/fused_layers.py", "forward/test_fused_layers.py::test_a_text_stays_in_narrow_passes_where_wide_ones_have_other_bits",
          "if not run.batch_invariant and hidden_states.shape[1] > MOST_ROWS:", "if hidden_states.shape[1] > MOST_ROWS:"),
    Fault("blocks of a wide pass begin at its first token", "attention/sdpa.py", "forward/test_fused_layers.py::test_a_text_in_wide_passes_has_the_bits_of_narrow_ones",
          "attention(layout, length + start,", "attention(layout, length + 0,"),
    Fault("a replayed pass has another layer's bits outside of inference mode", "forward/target.py",
          "forward/test_fused_layers.py::test_a_replayed_pass_is_made_by_kernels_whoever_asks",
          "    @torch.inference_mode()\n    def compute_static(\n", "    def compute_static(\n"),
    Fault("angles that are known are of one position less", "forward/cuda/fused_layers.py", "forward/test_fused_layers.py",
          "places = torch.arange(positions, device", "places = torch.arange(1, positions + 1, device"),
    Fault("texts have wide passes untried", "forward/exact_passes.py", "forward/test_fused_layers.py::test_a_text_stays_in_narrow_passes_where_wide_ones_have_other_bits",
          "found[0], found[1]", "found[0], found[0]"),
    Fault("a minimum is left out", "forward/cuda/code_kernels.py", CODES_ON_DEVICE,
          "total = tl.fma(inputs_sum, minimum, total)", "total = tl.fma(inputs_sum, 0 * minimum, total)"),
    Fault("a code that stands for 0 leaves no room for large ones", "models/codes.py", CODES_ON_DEVICE,
          "most - code < 128 and ", ""),
    Fault("products that count nothing are bounded by counters", "forward/cuda/code_kernels.py", CODES_ON_DEVICE,
          "counts = layout", "counts = True or layout"),
    Fault("all products are of the first one's codes", "forward/cuda/code_kernels.py", CODES_ON_DEVICE,
          "alike = len({each.form for each in codes}) == 1 ==", "alike = True or len({each.form for each in codes}) == 1 =="),
    Fault("another middle is taken from a code of 4 bits", "models/codes.py", CODES_ON_DEVICE,
          "self.centre = MIDDLE[self.bits]", "self.centre = MIDDLE[self.bits] - 1"),
    Fault("kernels take another middle from a code of 4 bits", "forward/cuda/code_kernels.py", CODES_ON_DEVICE,
          "third, fourth = (bits >> 8 & 15).to(tl.float32) - 8", "third, fourth = (bits >> 8 & 15).to(tl.float32) - 7"),
    Fault("the second block of a unit is read as the first", "forward/cuda/code_kernels.py", CODES_ON_DEVICE,
          "codes[block * (BLOCK // _WORDS) + cut]", "codes[cut]"),
    Fault("a part of a product begins where the first does", "forward/cuda/code_kernels.py", CODES_ON_DEVICE,
          "begin = (part * ADDED + index) * SPAN", "begin = part * 0 + index * SPAN"),
    Fault("products of codes in a wide pass begin with the first part", "forward/cuda/code_kernels.py", CODES_ON_DEVICE,
          "begin = (part * ADDED + index) * SPAN", "begin = part * ADDED * SPAN"),
    Fault("a SiLU's two products are counted apart", "forward/cuda/code_kernels.py", CODES_ON_DEVICE,
          "unit = tile % tiles if", "unit = tile if"),
    Fault("halves of all heads are counted as one's", "forward/cuda/code_kernels.py", CODES_ON_DEVICE,
          "else tile // together", "else tile // together * 0"),
    Fault("layers are tried as if a program multiplied for a whole head", "forward/cuda/layers_check.py", CODES_ON_DEVICE,
          "width = head_width(head) if", "width = head if"),
    Fault("a device takes a sign of 8 bits for another code's", "forward/cuda/code_kernels.py", CODES_ON_DEVICE,
          "lop3.b32 $3, high, 0x00800080", "lop3.b32 $3, $4, 0x00800080"),
    Fault("a device shifts codes of 4 bits too little", "forward/cuda/code_kernels.py", CODES_ON_DEVICE,
          "shr.u32 fourth, $4, 12;", "shr.u32 fourth, $4, 11;"),
    Fault("a biasless product of codes", "forward/cuda/code_kernels.py", CODES_ON_DEVICE,
          "if part + index == 0:", "if False:"),
    Fault("rows of odd sizes are multiplied by kernels of codes", "loading/plan.py", CODES_ON_DEVICE,
          "if each.in_features % UNIT)", "if False)"),
    Fault("products of codes are not tried", "loading/network.py", CODES_ON_DEVICE,
          "    if kernels:\n        _try_codes(network, plan)\n", "    if kernels:\n        network.to(plan.device)\n"),
    Fault("kernels of codes are tried with one layer alone", "forward/cuda/fused_layers.py", "forward/test_codes_on_device.py::test_a_layer_of_each_form_is_tried",
          "for layer in layers_by_form(network):", "for layer in layers_by_form(network)[:1]:"),
    Fault("the largest matrix comes to a device that is full", "loading/packing.py", "forward/test_codes_on_device.py::test_one_matrix_at_a_time_is_packed_the_largest_first",
          "key=lambda named: -named[1].numel()", "key=lambda named: named[1].numel()"),
    Fault("scales of codes are not counted on a GPU", "loading/packing.py", "cli/test_integer_weights.py::test_a_floor_on_a_gpu_counts_codes_and_scales",
          "2 * torch.float16.itemsize", "0 * torch.float16.itemsize"),
    Fault("scales without minima are counted as halves on a GPU", "loading/packing.py", f"{CODES_ON_DEVICE}::test_those_of_a_file_are_the_same_on_a_device",
          "_FLOAT if numbers == 1 and dtype != torch.float32 else size", "size"),
    Fault("scales and minima on a device are halves whatever they are", "models/codes.py", f"{CODES_ON_DEVICE}::test_those_of_a_file_are_the_same_on_a_device",
          "half = minima and all(", "half = minima or all("),
    Fault("scales of halves and of floats are read alike", "models/codes.py", f"{CODES_ON_DEVICE}::test_scales_of_both_dtypes_are_read_in_one_launch",
          "self.factors.shape[2] == 2, self.kind", "self.factors.shape[2] == 2, torch.float32"),
    Fault("a device's minima stand for the code 0", "forward/cuda/code_kernels.py", CODES_ON_DEVICE,
          "_MIDDLE_OF_4 if BITS == 4 else _MIDDLE_OF_8", "0.0 if BITS == 4 else _MIDDLE_OF_8"),
    Fault("a layer adds nothing", "forward/cuda/fused_layers.py", "forward/test_fused_layers.py::test_layers_compute_what_transformers_does",
          "add_product(active, product_of(mlp.down_proj), rows)", "add_product(active, product_of(mlp.down_proj), 0 * rows)"),
    Fault("a layer takes the squares of another input", "forward/cuda/fused_layers.py", "forward/test_fused_layers.py::test_a_layer_takes_only_the_squares_of_its_own_input",
          "if squares is None or known is not given:", "if squares is None:"),
    Fault("what was held back is in no step's text", "decoding/loop.py", "test_api.py jobs/test_chat.py cli/test_generate.py",
          "pieces.append(text.finish())", "text.finish()"),
    Fault("a step's text has that of the step before", "decoding/loop.py", "test_api.py",
          "                pieces.clear()\n", ""),
    Fault("tokens behind a stop string are kept", "decoding/loop.py", STOPS,
          "                    return count\n", "                    return len(tokens)\n"),
    Fault("a stop string is looked for in every token alone", "decoding/text.py", "jobs/test_text.py",
          "text = self._waiting + piece\n", "text = piece\n"),
    Fault("what may become a stop string is given", "decoding/text.py", "jobs/test_text.py",
          "        self._waiting = text[begun:]\n", "        begun = len(text)\n"),
    Fault("log-probabilities penalise tokens to come", "sampling/rule.py", STOPS,
          ".tril()", ""),
    Fault("the end of text is not banned", "sampling/parameters.py", "decoding/test_generation.py",
          "sorted({*params.banned, *eos_ids})", "sorted({*params.banned})"),
    # drafting and its caches
    Fault("one sink too many", "caches.py", CACHES,
          "sinks = min(self.sinks, text)", "sinks = min(self.sinks + 1, text)"),
    Fault("a partial cache is not selected anew", "caches.py", "test_caches.py drafting/test_chain.py",
          "(new + most > self.room or", "(self.copied == 0 or new > self.room or"),
    Fault("a partial cache keeps old values", "caches.py", CACHES,
          "zip(self.rows, full.rows, strict=True)", "zip(self.rows[:1], full.rows[:1], strict=True)"),
    Fault("a rollback is off by one", "caches.py", CACHES,
          "self.length -= self.seen - seen", "self.length -= max(0, self.seen - seen - 1)"),
    Fault("a figure of a busy moment is remembered", "drafting/costs.py", "drafting/test_costs.py",
          "if file and not costs.busy:", "if file:"),
    Fault("a GPU's costs are measured over few keys", "drafting/costs.py", "drafting/test_costs.py",
          '"cuda": (49_152,', '"cuda": (4_096,'),
    Fault("costs are of steps that accept nothing", "drafting/costs.py", "drafting/test_costs.py",
          "tree.add(self.right.get(context.kv.length, ()), \"\")", "pass"),
    Fault("arms are tried without a prospect", "drafting/adaptive.py", "drafting/test_adaptive.py",
          "index == self._best or may_pay(index)", "True"),
    Fault("auto's choice holds its drafter, and so every cache", "drafting/adaptive.py", KEPT,
          "self.bandit = Bandit(len(self.arms), self.times)", "self.bandit = Bandit(len(self.arms), self.times)\n        self.bandit.asks = self.learn"),
    Fault("a drafter's program holds the drafter", "drafting/networks.py", KEPT,
          "own_self = weakref.proxy(self)", "own_self = self"),
    Fault("what states go on by holds them", "forward/cpu/program.py", KEPT,
          "states.replays = [partial(self._go_on, ", "states.replays = [partial(lambda held, *given: self._go_on(*given), states, "),
    Fault("the trial of costs holds its cache", "drafting/costs.py", "drafting/test_costs.py",
          "_begin(length)\n            for _ in range(_ACCEPTED)", "_begin(length)\n            self._draft.trial = self\n            for _ in range(_ACCEPTED)"),
    Fault("passes correct costs at once after a prompt", "drafting/adaptive.py", "drafting/test_adaptive.py",
          "if self._cold > 0:", "if False:"),
    Fault("heads are tried whatever a node costs", "drafting/heads.py", "drafting/test_adaptive.py",
          "sizes, costs.level) > WORTH_A_TRIAL", "sizes, costs.level) > -1"),
    Fault("a smaller model is tried whatever a node costs", "decoding/drafter.py", "drafting/test_adaptive.py",
          "_CHANCE) > WORTH_A_TRIAL", "_CHANCE) > -1"),
    Fault("logits are kept that no draft can pay", "drafting/history.py", "drafting/test_adaptive.py",
          "not self.pays(self.costs, context.kv.length, _REPEATS)", "False"),
    Fault("where a node is dear nothing is recalled", "drafting/history.py", "drafting/test_adaptive.py",
          "else max(_GAIN, self._recall.repeats)", "else _GAIN"),
    Fault("the time of steps corrects no costs", "drafting/dynamic_tree.py", "drafting/test_dynamic_tree.py",
          "passes * factors[self._places[:count]]", "passes"),
    Fault("a floor forgets that the text grows", "benchmarking/roofline.py", "benchmarking/test_roofline.py",
          "context + np.arange(tokens, dtype=float)", "context + np.zeros(tokens)"),
    Fault("alpha is of what could have been drafted", "decoding/stats.py", "decoding/test_stats.py",
          "if step.drafted is not None:", "if False:"),
    Fault("a step does not say what it drafted", "decoding/loop.py", "decoding/test_stats.py",
          "max(tree.depths) if self._drafter.varies else None", "None"),
    Fault("evaluation comes on top of the minutes", "training/run.py", "training/test_run.py",
          "- 2 * self._record.get(EVALUATING, 0.0)", ""),
    Fault("weights in a cache are read from memory", "benchmarking/roofline.py", "benchmarking/test_roofline.py::test_rates_are_those_of_what_a_pass_reads_and_multiplies",
          "size = min(size, max(shape.weight_bytes, _LEAST_READ))", "pass"),
    Fault("integers are multiplied as slowly as floats", "benchmarking/roofline.py", "benchmarking/test_roofline.py::test_rates_are_those_of_what_a_pass_reads_and_multiplies",
          "_multiplied(shape.narrowest_bits)", "_multiplied(32)"),
    Fault("a product is made once for many sums", "benchmarking/rates.c", "benchmarking/test_roofline.py::test_multiply_adds_are_counted_and_stay_in_registers",
          "UNKNOWN(x);  ", "            "),
    Fault("a chain's keys stay in the cache", "drafting/chains.py", "drafting/test_chain.py",
          "context.kv.rewind(self._held)", "context.kv.rewind(self._held._replace(length=self._held.length + 1))"),
    Fault("auto takes options that nothing reads beside recurrent layers", "drafting/methods.py", "drafting/test_read.py",
          "return OF_CASCADE - network", "return frozenset() - network"),
    Fault("what was typed with its default counts as not typed", "drafting/methods.py", "drafting/test_methods.py",
          '"ngrams" if options.ngrams else None', '"ngrams" if options.ngrams not in (None, 0, NGRAMS) else None'),
    Fault("what a plan resolved is resolved anew", "drafting/methods.py", "test_house.py",
          "    if isinstance(options, ResolvedOptions):\n        return _fitted", "    if False:\n        return _fitted"),
    Fault("n-grams are read from the penalty window", "drafting/ngrams.py", "drafting/test_history.py",
          "len(context.text) - hidden + 1)", "len(context.text) + 1)"),
    Fault("of equally frequent n-grams the first counted wins", "drafting/ngrams.py", "drafting/test_history.py",
          "[best[place - 1]] <= count", "[best[place - 1]] < count"),
    Fault("4-grams are left out where there is room", "drafting/methods.py", "drafting/test_methods.py",
          "1 + sum(tree) >= _set(nodes)", "True"),
    Fault("4-grams are typed and not looked for", "drafting/methods.py", "drafting/test_methods.py",
          "if typed and _filled(model, tree, nodes):", "if False:"),
    Fault("heads read the wrong hidden row", "drafting/heads.py", "drafting/test_heads.py",
          "else (context.last, context.node)", "else (context.last, 0)"),
    # audit, exact passes, attention
    Fault("the audit accepts any token", "decoding/audit.py", "decoding/test_audit.py",
          "margin is not None and margin <= bound else", "margin is not None else"),
    Fault("the audit judges with the noise of the next token", "decoding/audit.py", "decoding/test_audit.py",
          "noise(places).expand", "noise([place + 1 for place in places]).expand"),
    Fault("exact passes have the width of the tree", "forward/passes.py", "lossless/test_bits.py",
          "    return width\n", "    return nodes\n"),
    Fault("the kernel's tail misses the node itself", "attention/triton.py", KERNEL,
          "prefix + own_depth + 1)", "prefix + own_depth)"),
    Fault("the kernel's window is one too wide", "attention/triton.py", KERNEL,
          "slots[None, :] > farthest[:, None]", "slots[None, :] >= farthest[:, None]"),
    Fault("the kernel splits by the prefix", "attention/triton.py", KERNEL,
          "split = tl.maximum(position - REACH, 0)", "split = tl.maximum(prefix + 0 * position - REACH + 63, 0)"),
    Fault("the kernel's tiles depend on the pass", "attention/triton.py", KERNEL,
          '"KEYS": run.keys,', '"KEYS": run.keys // (1 + (rows > 8)),'),
    Fault("exact attention's blocks depend on the length", "attention/sdpa.py", CHUNKED,
          "size = min(max(at, _LEAST), most)", "size = min(max(at, _LEAST), most, -(-end // 4))"),
    Fault("exact attention's tail keeps gaps", "attention/sdpa.py", CHUNKED,
          "torch.where(seen, slots, -1).sort(1).values[:", "torch.where(seen, slots, -1)[:"),
    Fault("exact attention computes rows of a block together", "attention/sdpa.py", CHUNKED,
          "    return torch.stack([torch.bmm(a, b) for a, b in zip(left, right, strict=False)])",
          "    if isinstance(right, repeat):\n"
          "        left = torch.stack(list(left))\n"
          "        found = torch.bmm(left.transpose(0, 1).flatten(1, 2), next(right))\n"
          "        return found.unflatten(1, (len(left), -1)).transpose(0, 1)\n"
          "    return torch.stack([torch.bmm(a, b) for a, b in zip(left, right, strict=False)])"),
    Fault("the C kernel splits by the prefix", "attention/native.c", NATIVE,
          "far < c->prefix ? far", "far < c->prefix ? c->prefix"),
    Fault("the C kernel's tail begins where the pass does", "attention/native.c", NATIVE,
          "c->prefix + depth(c, node) - DRAFTED", "c->prefix - DRAFTED"),
    Fault("the C kernel adds weights up by slots", "attention/native.c", NATIVE,
          "c->prefix + depth(c, slot - c->prefix)", "slot"),
    Fault("sums of 16-bit products overflow", "attention/native.c", NATIVE, "SUM = 65000,", "SUM = 140000,"),
    Fault("weights of integers are not those that rounding left", "attention/native.c", NATIVE,
          "b->total[r] += total[r * dims];", "b->total[r] += by[r * dims] > 0;"),
    Fault("what 128 stands for is not taken off", "attention/native.c", NATIVE, "= -ZERO * all;", "= 0;"),
    Fault("a value of bytes has the step of the next", "attention/native.c", NATIVE,
          "memcpy(&step, from[k] + WIDTH, sizeof step);",
          "memcpy(&step, from[(k + 1) % PACKED] + WIDTH, sizeof step);"),
    Fault("a row of bytes is a step too short", "forward/cpu/program.c", "forward/test_program.py",
          "const float step = largest / 127", "const float step = largest / 128"),
    Fault("a broken row of bytes is kept", "caches.py", KV_DTYPE,
          "    step = step.where(step.isfinite(), torch.nan)\n", "    step = step.nan_to_num(1, 1)\n"),
    Fault("a broken key becomes an integer", "caches.py", f"{PROGRAM}::test_integers_show_what_is_broken",
          ".where(counts.isfinite(), _BROKEN)", ".nan_to_num(0)"),
    Fault("the C kernel adds few rows up in another order", "attention/native.c", NATIVE,
          "if (dims == 4) x = x + swap_pairs(x);",
          "if (dims == 4) return (x + swap_neighbours(x)) + swap_pairs(x + swap_neighbours(x));"),
    # files and figures
    Fault("the last flush is missing", "jobs/job.py", "cli/test_generate.py::test_ctrl_c_keeps_what_was_made",
          "rest = self.text.finish()", 'rest = ""'),
    Fault("the last checkpoint is missing", "jobs/job.py", "jobs/test_resume.py",
          "            self.folder.checkpoint(self.stats.counters(), last=True)\n", ""),
    Fault("run.json is written after the prefill", "jobs/job.py", "jobs/test_resume.py",
          "signals or Signals()\n        self.folder.record(self._record())\n", "signals or Signals()\n"),
    Fault("a resumed run draws its last token again", "jobs/resuming.py", "jobs/test_resume.py",
          "written=tokens)", "written=tokens[:-1])"),
    Fault("a file begun before the first record keeps a folder", "jobs/folder.py",
          "jobs/test_every_call.py serving/test_every_call.py",
          ", *(name + NEW for name in (PROMPT, REQUEST, RECORD))", ""),
    Fault("a run that is made longer stays finished", "jobs/folder.py", "jobs/test_every_call.py::test_a_run_that_goes_on",
          "        folder.record(replace(record, state=RUNNING))\n", ""),
    Fault("the journal does not vouch for log-probabilities", "jobs/folder.py", "jobs/test_resume.py",
          "checkpoint.rows_crc32 not in (None, rows_crc)", "False"),
    Fault("an older journal's log-probabilities are damage", "jobs/folder.py", "jobs/test_resume.py",
          "not in (None, rows_crc)", "not in (rows_crc,)"),
    Fault("verify does not read the text", "jobs/verification.py", "cli/test_verify.py",
          "run.config.text.seed, run.path, note, fault\n", 'run.config.text.seed, run.path, note, ""\n'),
    Fault("a finished run's text is not read", "jobs/resuming.py", "jobs/test_resume.py",
          "if fault and not discard_damaged:", "if False:"),
    Fault("the server serves another text than that of the tokens", "serving/service.py", "serving/test_service.py",
          "if entry.state == FINISHED and not fault:", "if False:"),
    Fault("links in a run's folder are followed", "files.py", "jobs/test_folder.py", "os.lstat(path)", "os.stat(path)"),
    Fault("pipes in a run's folder are opened", "files.py", "jobs/test_folder.py",
          "    status_of_regular_file(path, option)\n    return os.open", "    return os.open"),
    Fault("the gate's sign is wrong", "benchmarking/gate.py", "benchmarking/test_gate.py",
          "(ours - self.limit(baseline))", "(self.limit(baseline) - ours)"),
    Fault("an option may be no number", "options.py", "test_options.py",
          "or math.isfinite(value))", "or True)"),
    Fault("a record may hold what nobody knows", "options.py", "benchmarking/test_gate.py",
          "if unknown := known.keys() - hints.keys():", "if unknown := set():"),
    Fault("a record's rules are not asked", "options.py", "benchmarking/test_gate.py",
          "and not carried.rule[1](value):", "and False:"),
    Fault("a record's numbers have no range", "options.py", "benchmarking/test_gate.py",
          "        carried = parts[1]\n        value = checked(parts[0], value, place, carried)", "        carried = parts[1]\n        value = checked(parts[0], value, place)"),
    Fault("an integer of a record becomes a fraction", "options.py", "benchmarking/test_gate.py",
          "value = checked(parts[0], value, place, carried)", "value = checked(parts[0], float(value) if (type(value), parts[0]) == (int, float) else value, place, carried)"),
    Fault("a record says what it has nothing to say of", "benchmarking/record.py", "benchmarking/test_gate.py",
          "content[each.name] in (None, [])", "content[each.name] == []"),
    Fault("half a cell is taken for a whole one", "benchmarking/resume.py", "cli/test_bench_grid.py::test_a_stopped_or_killed_one_goes_on_with_what_is_missing",
          "for sample in before.samples if sample.cell in before.done]", "for sample in before.samples]"),
    # published drafters
    Fault("taps are a layer off", "forward/target.py", NETWORKS,
          "Tap(self._decoder.layers[layer])", "Tap(self._decoder.layers[layer - 1])"),
    Fault("a block begins a place early", "speculators/block.py", NETWORKS,
          "position + block", "position + block - 1"),
    Fault("DFlash's slot of the root is a guess", "speculators/block.py", NETWORKS,
          "self.norm(rows)[int(self.spec.in_place) :]", "self.norm(rows)"),
    Fault("DFlash2 mixes a slot with those after it", "speculators/drafter_layers.py", NETWORKS,
          "padded[taps - 1 - tap :]", "padded[tap:]"),
    Fault("DFlash2's selector reads the first slot's state", "speculators/block.py", NETWORKS,
          "hidden[level : level + 1], tokens)", "hidden[:1], tokens)"),
    Fault("Cohere's factor counts around its decoders, too", "forward/hf.py", "models/test_classes.py",
          "if config.model_type in _UNSCALED:", "if False:"),
    Fault("z-lab's windows end at the root", "speculators/layouts/zlab.py", NETWORKS,
          "moving=True", "moving=False"),
    Fault("z-lab's windows are a token too wide", "speculators/layouts/zlab.py", NETWORKS,
          "edge=1", "edge=0"),
    Fault("what the library speculators writes and nobody serves is SafeAILab's", "speculators/drafter_files.py", NETWORKS,
          " and BY_LIBRARY not in config", ""),
    Fault("EAGLE-3's ids always name what goes into layers", "speculators/layouts/eagle.py", NETWORKS,
          "tap + 1 for tap", "tap for tap"),
    Fault("the library's DFlash guesses the next token", "speculators/layouts/library.py", NETWORKS,
          'not said.get("sample_from_anchor", dspark)', "False"),
    Fault("DeepSpec's confidence head may be missing", "speculators/layouts/deepspec.py", NETWORKS,
          "name not in said.stored", "False"),
    Fault("z-lab's drafters read embeddings as the model's layers do", "speculators/block.py", NETWORKS,
          "self.target.embed(tokens, self.spec.embed_scale)", "self.target.embed(tokens)"),
    Fault("z-lab's factor and cap are the model's", "speculators/block.py", NETWORKS,
          "self.target.open_logits(hidden, self.spec.output)", "self.target.open_logits(hidden)"),
    Fault("embeddings as they are stored are scaled by the model", "forward/target.py", NETWORKS,
          "F.embedding(tokens, layer.weight)", "layer(tokens)"),
    Fault("an assistant reads the first layer of a kind", "speculators/assistant.py", ASSISTANTS,
          "layer = max(at for at", "layer = min(at for at"),
    Fault("an assistant moves on with what it drafts", "speculators/assistant.py", ASSISTANTS,
          "places = position.expand(1, len(tokens))", "places = (position + level).expand(1, len(tokens))"),
    Fault("an assistant's window is a token too wide", "speculators/layouts/gemma.py", ASSISTANTS,
          "text.sliding_window + 1", "text.sliding_window + 2"),
    Fault("heads are found for other weights of the same shapes", "models/checkpoint.py", "test_found_heads.py",
          "digest.update(tensor.beginning().view(torch.uint8).numpy().tobytes())", "pass"),
    Fault("a run goes on with heads that were installed since", "jobs/resuming.py", "test_found_heads.py",
          "wanted = replace(wanted, heads=NO_HEADS)", "pass"),
    Fault("a row of the teacher's file counts before it is written", "training/teacher.py", "training/test_teacher.py",
          "        self._rows.flush()  # a row that is not whole is made again\n        row[\"whole\"] = True\n",
          "        row[\"whole\"] = True\n        self._rows.flush()\n"),
    Fault("heads learn what the model says a token too late", "training/losses.py", "training/test_losses.py",
          "after = 1 + (self._objective == TEXT)", "after = 2"),
    Fault("every epoch has its rows in the same order", "training/teacher.py", "training/test_teacher.py",
          "default_rng([self._seed, epoch])", "default_rng([self._seed])"),
    Fault("what EAGLE drafts stays at one place", "speculators/eagle.py", f"{NETWORKS}::test_logits_are_those_of_a_dense_recomputation",
          "used\n            places = (position - 1 + level).expand", "used\n            places = (position - 1).expand"),
    Fault("the draft vocabulary is not mapped", "speculators/draft_network.py", f"{NETWORKS}::test_logits_are_those_of_a_dense_recomputation",
          "network.d2t + torch.arange", "torch.arange"),
    Fault("a drafter's window has no sinks", "caches.py", NETWORKS,
          "self.sinks + (place - self.sinks) % ring", "place % self.budget"),
    Fault("a drafter is told the token, not the next one", "drafting/networks.py", f"{TREES_OF}::test_after_many_rounds_it_offers_what_a_dense_recomputation_ranks_first",
          "text[places.start + 1 : places.stop + 1]", "text[places.start : places.stop]"),
    Fault("a drafter's levels have the noise of the ones before", "drafting/networks.py", TREES_OF,
          "position + 1 + level", "position + level"),
    Fault("states of nodes beside the path enter the window", "drafting/networks.py", TREES_OF,
          "torch.tensor(context.path[-count:])", "torch.arange(count)"),
    Fault("a branch of a drafter goes on from another's state", "drafting/networks.py", f"{TREES_OF}::test_after_many_rounds_it_offers_what_a_dense_recomputation_ranks_first",
          "rows = picked // self._width", "rows = picked % count"),
    Fault("a drafter's round costs a host nothing", "drafting/networks.py", TREES_OF,
          "return self._seconds", "return 0.0"),
    Fault("a host's window lacks the newest token", "drafting/networks.py", TREES_OF,
          'int(given["last"]) + 1 if', 'int(given["last"]) if'),
    # the server
    Fault("a character begun is sent when a run is interrupted", "serving/run.py", "serving/test_service.py",
          'elif job.state != RUNNING:\n                # a character', "elif False:\n                # a character"),
    Fault("what waited is asked with the new server's defaults", "serving/service.py", "serving/test_killing.py::test_a_server_killed_in_a_stream",
          '{**self._typed_model, **of_json(content["typed"])}', "self._typed"),
    Fault("parts of characters have no bytes", "serving/routes.py", "serving/test_server.py::test_logprobs_of_a_chat",
          "_bytes_of(backend.id_to_token(token)) if broken", "None if broken"),
    Fault("a reader that comes back gets the text anew", "serving/routes.py", "serving/test_killing.py::test_a_server_killed_in_a_stream",
          "tokens, start = have or (0, 0)", "tokens, start = 0, 0"),
    Fault("a dropped connection cancels", "serving/routes.py", "serving/test_service.py::test_only_who_made_a_run_cancels_it_by_leaving_and_only_if_that_was_asked_for",
          "if leaving else None", "if run else None"),
]  # fmt: skip


def run_tests(tree: Path, tests: str, slow: bool) -> tuple[int, str]:
    """Exit code of pytest, and the first test that failed.

    It runs in a fork of this process, which has imported what takes seconds to be imported.
    """
    words = ["-x", "-p", "no:cacheprovider", *(f"tests/{name}" for name in tests.split())]
    words += ["-m", ""] if slow or "::" in tests else []
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.chdir(tree)
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            sys.path[:] = [str(tree / "src"), str(tree), *sys.path]
            for name in [each for each in sys.modules if each.split(".")[0] == "tests"]:
                del sys.modules[name]
            os._exit(int(pytest.main(words)))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        lines = output.read().splitlines()
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return code, failed[0] if failed else ""


def prepare(tree: Path):
    """What all runs share: their environment, compiled C, and modules that no fault changes."""
    cache = str(tree / ".cache")
    os.mkdir(cache, 0o700)
    # no bytecode: a file changed twice within a second is told from the one before by its length
    # alone
    os.environ |= {
        "PYTHONPATH": f"{tree / 'src'}:{tree}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_PROFILE": "planted",
        "TSWIFT_TESTS_CACHE": cache,
        "XDG_CACHE_HOME": cache,
        "HF_DATASETS_CACHE": cache,
    }
    sys.dont_write_bytecode = True
    import_module("tests.conftest")  # it says how Triton is to be imported
    for name in ("hypothesis", "transformers.models.llama.modeling_llama"):
        import_module(name)


def forget(tree: Path):
    """Leave nothing in the cache but libraries, which are called by their sources: what a fault
    has spoiled is not for the next one.
    """
    for path in (tree / ".cache").rglob("*"):
        if path.is_file() and path.suffix not in (".so", ".sha256"):
            path.unlink()


def planted(tree: Path, fault: Fault, slow: bool) -> tuple[bool, str]:
    """Whether a fault is caught, and what is to be said of it; the tree is as before then."""
    path = tree / "src" / "tswift" / fault.file
    source = path.read_text() if path.exists() else ""
    if source.count(fault.old) != 1:
        return False, f"does not apply: {source.count(fault.old)} places in {fault.file}"
    path.write_text(source.replace(fault.old, fault.new))
    started = time.perf_counter()
    try:
        code, failed = run_tests(tree, fault.tests, slow)
    finally:
        path.write_text(source)
        forget(tree)
    words = {0: "NOT CAUGHT", 1: f"caught by {failed}"}.get(code, f"pytest ended with {code}")
    return code == 1, f"{words} ({time.perf_counter() - started:.0f} s)"


def main() -> int:
    """Plant the faults one by one and say what came of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument("--all", action="store_true", help="run slow tests too")
    parser.add_argument(
        "--tree", type=Path, default=Path(__file__).parents[1], help="where to plant them"
    )
    given = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if not given.patterns or any(each in fault.name for each in given.patterns)
    ]
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=given.tree, capture_output=True, text=True, check=True
    )
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, listed.stdout.split("\0")):
            if (given.tree / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(given.tree / name, Path(folder) / name)
        prepare(Path(folder))
        for fault in chosen:
            caught, words = planted(Path(folder), fault, given.all)
            missed += not caught
            print(f"{fault.name:55} {words}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults were caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
