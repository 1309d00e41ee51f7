"""Makes tests/gpt2_by_transformers: a small GPT-2 of random weights as Hugging Face's transformers
saves it, and what transformers and PyTorch compute with it. It needs the packages torch and
transformers.

    python tests/gpt2_fixture.py

losses.json has a text of random tokens, and transformers' loss on each batch of it, 4 x 32 tokens,
before each of 12 steps of AdamW as in nanoGPT: only matrices decay, gradients are clipped.
"""

import json
import math
from pathlib import Path

import torch
import transformers

FOLDER = Path(__file__).parent / "gpt2_by_transformers"
STEPS = 12
RATE = 0.01
ROWS = 4
T = 32


def rate(step: int) -> float:
    """Optax's warmup_cosine_decay_schedule without a warm-up: by a cosine to a tenth."""
    return RATE * (0.1 + 0.9 * (1 + math.cos(math.pi * step / STEPS)) / 2)


def main() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=257, n_positions=T, n_embd=16, n_layer=2, n_head=2, initializer_range=0.2
    )
    config.bos_token_id = config.eos_token_id = 256
    model = transformers.GPT2LMHeadModel(config).eval()  # without dropout, also in the steps
    with torch.no_grad():  # as they are made, biases are 0 and LayerNorm's weights 1
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    model.save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)  # no test reads it

    text = torch.randint(0, 64, (STEPS * ROWS * T + 1,))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        start = step * ROWS * T
        rows = [text[start + i * T : start + i * T + T + 1] for i in range(ROWS)]
        tokens_BT = torch.stack(rows)
        logits = model(tokens_BT[:, :-1]).logits
        step_loss = torch.nn.functional.cross_entropy(logits.mT, tokens_BT[:, 1:])
        losses.append(step_loss.item())
        step_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = rate(step)
        adamw.step()
        adamw.zero_grad()
    versions = dict(torch=torch.__version__, transformers=transformers.__version__)
    about = versions | dict(text=text.tolist(), losses=losses)
    (FOLDER / "losses.json").write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
