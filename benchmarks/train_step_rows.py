"""Steps over rows, as one writes them by hand, with PEFT and with Unsloth."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.train_step_job import ALPHA, LINEAR, RANK, RATE, Job, Way, kind


def merged_rows(job: Job) -> list[tuple[list[int], list[bool], float]]:
    """Each rollout once: its last prompt holds all that came before."""
    return [(r.ids, r.sampled, r.advantage) for group in job.rollouts for r in group]


def step_rows(job: Job) -> list[tuple[list[int], list[bool], float]]:
    """Each call by itself, with its whole prompt."""
    return [
        (r.ids[:end], [False] * start + [True] * (end - start), r.advantage)
        for group in job.rollouts
        for r in group
        for start, end in r.calls
    ]


def rows_step(
    job: Job,
    parameters: Sequence[Any],
    hidden_states: Callable[[Any], Any],
    head: Callable[[Any], Any],
    rows: list[tuple[list[int], list[bool], float]],
) -> Callable[[], float]:
    """Right-padded rows in micro-batches; logits of sampled tokens alone, in recomputed chunks."""
    import torch
    from torch.utils.checkpoint import checkpoint

    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    total = sum(sum(sampled) for _, sampled, _ in rows)
    batches: list[Any] = []
    for at in range(0, len(rows), job.rows):
        part = rows[at : at + job.rows]
        longest = max(len(ids) for ids, _, _ in part) - 1
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        places: list[int] = []
        tokens: list[int] = []
        advantages: list[float] = []
        for i, (row, sampled, advantage) in enumerate(part):
            ids[i, : len(row) - 1] = torch.tensor(row[:-1])
            chosen = [t for t, was in enumerate(sampled) if was]
            places += [i * longest + t - 1 for t in chosen]
            tokens += [row[t] for t in chosen]
            advantages += [advantage] * len(chosen)
        batches.append([t.to(job.device) for t in (ids, *map(torch.tensor, (places, tokens, advantages)))])

    def chunk(hidden: Any, tokens: Any) -> Any:
        logits = head(hidden).float()
        return torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]

    def step() -> float:
        for ids, places, tokens, advantages in batches:
            with torch.autocast(job.device, torch.bfloat16, enabled=not job.exact):
                hidden = hidden_states(ids).flatten(0, 1)[places]
                logprobs = torch.cat(
                    [
                        checkpoint(chunk, hidden[i : i + 1024], tokens[i : i + 1024], use_reentrant=False)
                        for i in range(0, len(tokens), 1024)
                    ]
                )
            ratio = torch.exp(logprobs - logprobs.detach())
            (-(advantages * ratio).sum() / total).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm)

    return step


def peft_model(job: Job) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        job.directory, dtype=kind(job), attn_implementation="sdpa"
    ).to(job.device)
    if job.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEAR))
    model.train()
    return model


def peft(job: Job, rows: list[tuple[list[int], list[bool], float]]) -> Way:
    model = peft_model(job)
    causal_lm = model.get_base_model()
    decoder = causal_lm.get_decoder()
    parameters = [p for p in model.parameters() if p.requires_grad]
    step = rows_step(
        job,
        parameters,
        lambda ids: decoder(input_ids=ids, use_cache=False).last_hidden_state,
        causal_lm.get_output_embeddings(),
        rows,
    )
    return Way(step, {"rows": len(rows), "row_tokens": sum(len(r[0]) for r in rows)})


def peft_rows(job: Job) -> Way:
    return peft(job, merged_rows(job))


def peft_step_rows(job: Job) -> Way:
    return peft(job, step_rows(job))


def unsloth_model(job: Job) -> tuple[Any, Any]:
    from unsloth import FastLanguageModel

    longest = max(len(r.ids) for group in job.rollouts for r in group)
    model, tokenizer = FastLanguageModel.from_pretrained(
        job.directory, dtype=kind(job), load_in_4bit=False, max_seq_length=longest + 64
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        bias="none",
        target_modules=LINEAR,
        use_gradient_checkpointing="unsloth" if job.checkpointing else False,
        random_state=0,
        max_seq_length=longest + 64,
    )
    model.train()
    return model, tokenizer


def unsloth_rows(job: Job) -> Way:
    """Unsloth's model in the same loop as PEFT's."""
    model, _ = unsloth_model(job)
    causal_lm = model.get_base_model()
    decoder = causal_lm.get_decoder()
    rows = merged_rows(job)
    step = rows_step(
        job,
        [p for p in model.parameters() if p.requires_grad],
        lambda ids: decoder(input_ids=ids, use_cache=False).last_hidden_state,
        causal_lm.get_output_embeddings(),
        rows,
    )
    return Way(step, {"rows": len(rows)})
