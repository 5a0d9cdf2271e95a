#!/usr/bin/env python3
"""Text from a model directory of mlx-lm, such as smollm2_to_mlx.py writes, with kvonce's attention.

usage: generate_mlx.py FOLDER [QUESTION]
"""
import sys

import kvonce.mlx
import mlx_lm

if len(sys.argv) < 2:
    sys.exit(__doc__)
model, tokenizer = mlx_lm.load(sys.argv[1])
question = " ".join(sys.argv[2:]) or "What is the capital of France?"
prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
with kvonce.mlx.patch():
    print(mlx_lm.generate(model, tokenizer, prompt, max_tokens=40))

counted = kvonce.mlx.stats()
print(f"{counted['served']} layer steps went to kvonce; fell back: {counted['fallbacks']}")
sys.exit(counted["served"] == 0)
