"""Steps of TRL's GRPO trainer over the same rows."""

from collections.abc import Callable
from typing import Any

from benchmarks.train_step_job import ALPHA, LINEAR, RANK, RATE, Job, Way, kind
from benchmarks.train_step_rows import unsloth_model


def trl_trainer(job: Job, model: Any, tokenizer: Any) -> Any:
    import tempfile

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    longest = max(len(r.ids) - r.calls[0][0] for group in job.rollouts for r in group)
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=job.rows,
        gradient_accumulation_steps=1,
        num_generations=2,
        max_completion_length=longest,
        beta=0.0,
        loss_type="dapo",
        learning_rate=RATE,
        bf16=job.device == "cuda",
        fp16=False,
        use_cpu=job.device == "cpu",
        gradient_checkpointing=job.checkpointing,
        report_to=[],
        use_vllm=False,
        **job.options.get("grpo_config", {}),
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * 8}),
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def trl_batches(job: Job) -> list[dict[str, Any]]:
    """Micro-batches as GRPOTrainer makes them: prompts, and completions with the tools' tokens masked."""
    import torch

    rollouts = [r for group in job.rollouts for r in group]
    total = torch.tensor(float(sum(sum(r.sampled) for r in rollouts)), device=job.device)
    found: list[dict[str, Any]] = []
    for at in range(0, len(rollouts), job.rows):
        part = rollouts[at : at + job.rows]
        start = part[0].calls[0][0]
        ids = torch.tensor([r.ids for r in part], device=job.device)
        sampled = torch.tensor([r.sampled for r in part], device=job.device).long()
        prompt, completion = ids[:, :start].contiguous(), ids[:, start:].contiguous()
        found.append(
            {
                "prompt_ids": prompt,
                "prompt_mask": torch.ones_like(prompt),
                "completion_ids": completion,
                "completion_mask": torch.ones_like(completion),
                "tool_mask": sampled[:, start:].contiguous(),
                "advantages": torch.tensor([r.advantage for r in part], device=job.device),
                "num_items_in_batch": total,
            }
        )
    return found


def trl_step(job: Job, trainer: Any, loss_of: Callable[[Any, dict[str, Any]], Any]) -> Callable[[], float]:
    import torch

    batches = trl_batches(job)
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)

    def step() -> float:
        for batch in batches:
            with trainer.compute_loss_context_manager():
                loss = loss_of(trainer, dict(batch))
            trainer.accelerator.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm)

    return step


def trl(job: Job) -> Way:
    """TRL's GRPOTrainer: its own loss over rows merged by trajectory."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(job.directory, dtype=kind(job)).to(job.device)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEAR))
    trainer = trl_trainer(job, model, AutoTokenizer.from_pretrained(job.directory))
    return Way(trl_step(job, trainer, lambda t, batch: t._compute_loss(t.model, batch)), {})


def trl_unsloth(job: Job) -> Way:
    """The GRPOTrainer that Unsloth puts in the place of TRL's."""
    import unsloth  # noqa: F401 - replaces TRL's trainer; must come before it

    model, tokenizer = unsloth_model(job)
    trainer = trl_trainer(job, model, tokenizer)
    way = trl_step(job, trainer, lambda t, batch: t.compute_loss(t.model, batch))
    return Way(way, {"trainer": type(trainer).__module__})
