# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # GRPO by hand
#
# Every formula of Group Relative Policy Optimization stands here beside the line that computes it: PyTorch and
# transformers, no trainer, no LoRA. At the end a small model is taught by these lines alone.
#
# A prompt $x$; a group of answers $y_1 \dots y_G$ drawn from the policy as it was, $\pi_{old}$; a reward $r_i$ for
# each. Better answers than their siblings become likelier, worse ones less likely. No value network: the group's mean
# is the baseline.

# %%
import copy
import warnings

warnings.filterwarnings("ignore", "IProgress")  # of a progress bar that is not shown
import torch
from transformers.utils import logging

from pellucid.policy.load import load_pretrained
from pellucid.tasks.expected import Expected
from pellucid.types import Completion, Prompt

logging.disable_progress_bar()
torch.manual_seed(42)
policy, tokenizer = load_pretrained("smollm2-135m", torch.float32)
policy.eval()  # no dropout: with it, the ratio of a policy to itself would not be 1
reference = copy.deepcopy(policy).requires_grad_(False)  # frozen, fp32, on the CPU

# %% [markdown]
# ## 1. Sample a group: $y_i \sim \pi_{old}(\cdot \mid x)$
#
# From the whole distribution at temperature 1. `generate()` would otherwise take top-k, top-p and a repetition penalty
# from the checkpoint, and the log-probs below would be those of another distribution than the one that was sampled.
#
# The stop token stays: to stop is a choice like any other, and an empty answer is an answer that stopped at once.

# %%
STOP = tokenizer.eos_token_id


def encode(prompt):
    messages = [dict(message) for message in prompt.text]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


@torch.no_grad()
def sample_group(prompt_ids, group_size, max_new_tokens):
    """-> responses [G, T] and mask [G, T]: 1 up to and with the first stop."""
    output = policy.generate(
        torch.tensor([prompt_ids] * group_size),
        attention_mask=torch.ones(group_size, len(prompt_ids), dtype=torch.long),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        pad_token_id=STOP,
    )
    responses = output[:, len(prompt_ids) :]
    stops = (responses == STOP).long()
    return responses, (stops.cumsum(1) - stops == 0).float()


def texts_of(responses, mask):
    lengths = mask.sum(1).int().tolist()
    return [tokenizer.decode(ids[:n], skip_special_tokens=True) for ids, n in zip(responses, lengths, strict=True)]


def asked(question, answer):
    return Prompt(question, ({"role": "user", "content": question},), answer)


task = Expected()  # its own four questions are Chinese, which this small model does not speak
questions = [
    asked("What is 3 + 4? Answer with the number only.", "7"),
    asked("What is the capital of France? Answer with one word.", "Paris"),
]
prompt = questions[0]
prompt_ids = encode(prompt)
responses, mask = sample_group(prompt_ids, group_size=4, max_new_tokens=24)
print(prompt.question, "->", prompt.answer)
for text in texts_of(responses, mask):
    print("   ", repr(text))

# %% [markdown]
# ## 2. Reward: $r_i = r(x, y_i)$
#
# One number for a whole answer: +1 for the expected text, -1 otherwise, less 0.002 for every character.


# %%
def rewards_of(prompt, texts):
    completions = [Completion((), (), text, True) for text in texts]
    return torch.tensor([task.reward(prompt, completion).value for completion in completions], dtype=torch.float64)


rewards = rewards_of(prompt, texts_of(responses, mask))
print(rewards)

# %% [markdown]
# ## 3. Advantage: each answer against its siblings
#
# $$\mu = \frac1G \sum_i r_i \qquad \sigma = \sqrt{\frac1G \sum_i (r_i - \mu)^2} \qquad A_i = \frac{r_i - \mu}{\sigma}$$
#
# Equal rewards teach nothing, and their advantage is 0: decided by comparing them, since $\sigma + \varepsilon$ turns
# rounding into signal. Only to centre, $A_i = r_i - \mu$, is the other normalisation: it does not give a group in which
# rewards hardly differ the same weight as one in which they differ by much.


# %%
def standardised(rewards):
    if rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / rewards.std(correction=0)


def centred(rewards):
    return rewards - rewards.mean()


for compared in (standardised, centred):
    print(
        f"{compared.__name__:13}",
        compared(torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64)).tolist(),
        compared(torch.tensor([-1.00, -1.01, -1.02, -1.03], dtype=torch.float64)).tolist(),
    )

# %% [markdown]
# The second group is all wrong, and differs only in length. Standardised, brevity counts as much as being right; that
# is what `algorithm.min_reward_range` is for.
#
# ## 4. Log-probabilities: $\log \pi_\theta(a_{i,t} \mid s_{i,t})$, where $s_{i,t} = (x, a_{i,<t})$
#
# The token at position $p$ is predicted from position $p - 1$: that shift, and nothing else, is what goes wrong here.


# %%
def logprobs_of(model, prompt_ids, responses):
    """-> log-prob of each response token [G, T], and of all tokens that could have stood there [G, T, V]."""
    length = responses.shape[1]
    ids = torch.cat([torch.tensor([prompt_ids] * len(responses)), responses], 1)
    logits = model(ids, logits_to_keep=length + 1).logits[:, :-1].float()
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, responses[..., None])[..., 0], log_probs


with torch.no_grad():
    logpi_old, _ = logprobs_of(policy, prompt_ids, responses)  # fixed from now on
    logpi_ref, _ = logprobs_of(reference, prompt_ids, responses)
print("mean log-prob of a token", float((logpi_old * mask).sum() / mask.sum()))

# %% [markdown]
# ## 5. Ratio and clip
#
# $$\rho_{i,t} = \exp(\log \pi_\theta - \log \pi_{old}) \qquad
#   L^{clip}_{i,t} = \min(\rho_{i,t} A_i,\ \mathrm{clip}(\rho_{i,t}, 1 - \epsilon, 1 + \epsilon) A_i)$$
#
# At the first step $\pi_\theta = \pi_{old}$, so every ratio is 1. (A ratio of *log-probabilities* would be upside down:
# both are negative, and its gradient lowers what was rewarded.)


# %%
def clipped_objective(logpi, logpi_old, advantages, clip_eps):
    ratio = torch.exp(logpi - logpi_old)
    return torch.min(ratio * advantages[:, None], ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages[:, None])


logpi, log_probs = logprobs_of(policy, prompt_ids, responses)
print("largest |ratio - 1|:", float(((logpi.detach() - logpi_old).exp() - 1).abs().mul(mask).max()))

# %% [markdown]
# ## 6. Two ways to add tokens up
#
# $$\frac1G \sum_i \frac1{T_i} \sum_t L_{i,t} \qquad\text{or}\qquad \frac{\sum_i \sum_t L_{i,t}}{\sum_i T_i}$$
#
# Each response counts once, or each token does. The first makes every token of a long answer matter less; at ratio 1
# its value is exactly $-\overline{A} = 0$, while the second shows how length goes with reward. Neither value is a
# measure of progress.


# %%
def mean_over_responses(x, mask):
    return ((x * mask).sum(1) / mask.sum(1)).mean()


def mean_over_tokens(x, mask):
    return (x * mask).sum() / mask.sum()


advantages = standardised(torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64)).float()
for mean in (mean_over_responses, mean_over_tokens):
    print(f"{mean.__name__:20}", float(-mean(clipped_objective(logpi, logpi_old, advantages, 0.2), mask).detach()))

# %% [markdown]
# ## 7. Entropy: $H = -\sum_a \pi(a) \log \pi(a)$
#
# Exactly, from all logits. With a coefficient above 0 it is a bonus for staying undecided.

# %%
entropy = -(log_probs.exp() * log_probs).sum(-1)
print("mean entropy of a token, in nats:", float(mean_over_tokens(entropy, mask).detach()))

# %% [markdown]
# ## 8. KL, and why k1 in the loss does nothing
#
# $\log \pi - \log \pi_{ref}$ of a sampled token is an unbiased estimate of the KL divergence. As a *term of the loss*
# it has the gradient $\nabla \log \pi$: the reference is gone. On average even that is nothing, since
# $\mathbb E_\pi[\nabla \log \pi] = \sum_a \nabla \pi(a) = \nabla 1 = 0$. What is left is noise.
#
# The sum over all tokens can be taken, here for one position and a policy that has moved away from its reference: the
# gradient of the KL itself, the expected gradient of k1 in the loss, of k2 in the loss, $\frac12 (\log \pi - \log
# \pi_{ref})^2$, and of k1 in the reward, where it multiplies $\nabla \log \pi$ as a reward does.

# %%
theta = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
ref = torch.tensor([0.0, 0.5, 0.0], dtype=torch.float64).log_softmax(-1)


def expected_gradient(of_token):
    """Of a loss that is drawn with a token: probabilities are what draws it, and have no gradient."""
    log_pi = theta.log_softmax(-1)
    return torch.autograd.grad((log_pi.detach().exp() * of_token(log_pi)).sum(), theta)[0]


log_pi = theta.log_softmax(-1)
exact = torch.autograd.grad((log_pi.exp() * (log_pi - ref)).sum(), theta)[0]
shown = {
    "KL itself": exact,
    "k1 in the loss": expected_gradient(lambda log_pi: log_pi - ref),
    "k2 in the loss": expected_gradient(lambda log_pi: (log_pi - ref).square() / 2),
    "k1 in the reward": expected_gradient(lambda log_pi: (log_pi - ref).detach() * log_pi),
}
for name, gradient in shown.items():
    print(f"{name:17}", [round(x, 6) + 0.0 for x in gradient.tolist()])
assert torch.allclose(shown["k1 in the loss"], torch.zeros(3, dtype=torch.float64), atol=1e-12)
assert torch.allclose(shown["k2 in the loss"], exact) and torch.allclose(shown["k1 in the reward"], exact)

# %% [markdown]
# So the KL goes into the reward here, outside the division by $\sigma$, each answer's against the mean of the others:
#
# $$A_i = \frac{r_i - \mu}{\sigma} - \beta \Bigl(K_i - \frac{1}{G - 1} \sum_{j \ne i} K_j\Bigr) \qquad
#   K_i = \sum_t (\log \pi_{old} - \log \pi_{ref})$$
#
# ## 9. The loop


# %%
def update(optimizer, prompt_ids, responses, mask, logpi_old, advantages, clip_eps=0.2, ent_coef=0.0, epochs=2):
    """`epochs` steps on the same answers; returns the share of tokens that the clip held back in the last."""
    for _ in range(epochs):
        logpi, log_probs = logprobs_of(policy, prompt_ids, responses)
        objective = clipped_objective(logpi, logpi_old, advantages.float(), clip_eps)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        loss = -mean_over_tokens(objective + ent_coef * entropy, mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    held = (torch.exp(logpi.detach() - logpi_old) - 1).abs() > clip_eps
    return float(mean_over_tokens(held.float(), mask))


def train(prompts, steps, group_size, max_new_tokens, lr, kl_coef):
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        prompt = prompts[step % len(prompts)]
        prompt_ids = encode(prompt)
        responses, mask = sample_group(prompt_ids, group_size, max_new_tokens)
        texts = texts_of(responses, mask)
        rewards = rewards_of(prompt, texts)
        with torch.no_grad():
            logpi_old, _ = logprobs_of(policy, prompt_ids, responses)
            logpi_ref, _ = logprobs_of(reference, prompt_ids, responses)
        kl = ((logpi_old - logpi_ref) * mask).sum(1).double()
        others = (kl.sum() - kl) / (group_size - 1)
        advantages = standardised(rewards) - kl_coef * (kl - others)
        clip_frac = update(optimizer, prompt_ids, responses, mask, logpi_old, advantages)
        best = int(rewards.argmax())
        print(
            f"step {step:2d}  reward {rewards.mean():+.3f} std {rewards.std(correction=0):.3f}  "
            f"KL {float(kl.sum() / mask.sum()):+.4f}  clipped {clip_frac:.2f}  "
            f"best {rewards[best]:+.2f} {texts[best]!r}"
        )


@torch.no_grad()
def chat(prompt):
    """The greedy answer."""
    ids = torch.tensor([encode(prompt)])
    output = policy.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=STOP
    )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


for prompt in questions:
    print(prompt.question, "->", repr(chat(prompt)))

# %%
train(questions[1:], steps=4, group_size=8, max_new_tokens=12, lr=1e-5, kl_coef=0.01)

# %%
for prompt in questions:
    print(prompt.question, "->", repr(chat(prompt)))
