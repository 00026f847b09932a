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
# This notebook has every formula of Group Relative Policy Optimization next to the line that computes it, in PyTorch
# and transformers, without a trainer and without LoRA. In the end these lines train a small model.
#
# GRPO samples a group of answers $y_1 \dots y_G$ to a prompt $x$ from the current policy $\pi_{old}$, and gives each
# answer a reward $r_i$. Answers that are better than the mean of their group become more likely, and worse ones less
# likely. The mean of the group is the baseline, so no value network is needed.

# %%
import copy
import warnings

warnings.filterwarnings("ignore", "IProgress")  # from a progress bar that is not shown
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
# Sample from the whole distribution at temperature 1. Without these arguments, `generate()` takes top-k, top-p and a
# repetition penalty from the checkpoint. Then the log-probabilities below would belong to a different distribution than
# the one sampled from.
#
# Keep the stop token: the policy chooses to stop, so this choice is trained too. An empty answer is one that stops at
# once.

# %%
STOP = tokenizer.eos_token_id


def encode(prompt):
    messages = [dict(message) for message in prompt.text]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


@torch.no_grad()
def sample_group(prompt_ids, group_size, max_new_tokens):
    """Return responses [G, T] and their mask [G, T]: 1 up to and including the first stop token."""
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


def decode_responses(responses, mask):
    lengths = mask.sum(1).int().tolist()
    return [tokenizer.decode(ids[:n], skip_special_tokens=True) for ids, n in zip(responses, lengths, strict=True)]


def make_prompt(question, answer):
    return Prompt(question, ({"role": "user", "content": question},), answer)


task = Expected()  # for its rewards; its own four questions are in Chinese, which this small model does not know
questions = [
    make_prompt("What is 3 + 4? Answer with the number only.", "7"),
    make_prompt("What is the capital of France? Answer with one word.", "Paris"),
]
prompt = questions[0]
prompt_ids = encode(prompt)
responses, mask = sample_group(prompt_ids, group_size=4, max_new_tokens=24)
print(prompt.question, "->", prompt.answer)
for text in decode_responses(responses, mask):
    print("   ", repr(text))

# %% [markdown]
# ## 2. Reward: $r_i = r(x, y_i)$
#
# The reward is one number for a whole answer: +1 for the expected text and -1 otherwise, minus 0.002 per character.


# %%
def grade_texts(prompt, texts):
    completions = [Completion((), (), text, True) for text in texts]
    return torch.tensor([task.reward(prompt, completion).value for completion in completions], dtype=torch.float64)


rewards = grade_texts(prompt, decode_responses(responses, mask))
print(rewards)

# %% [markdown]
# ## 3. Advantage: compare each answer with its group
#
# $$\mu = \frac1G \sum_i r_i \qquad \sigma = \sqrt{\frac1G \sum_i (r_i - \mu)^2} \qquad A_i = \frac{r_i - \mu}{\sigma}$$
#
# Equal rewards teach nothing, so their advantage is 0. Compare the rewards to find such groups: dividing by
# $\sigma + \varepsilon$ turns rounding errors into advantages. The alternative is to center only,
# $A_i = r_i - \mu$. Then a group with nearly equal rewards has less weight than one with different rewards.


# %%
def standardize(rewards):
    if rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / rewards.std(correction=0)


def center(rewards):
    return rewards - rewards.mean()


for normalize in (standardize, center):
    print(
        f"{normalize.__name__:13}",
        normalize(torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64)).tolist(),
        normalize(torch.tensor([-1.00, -1.01, -1.02, -1.03], dtype=torch.float64)).tolist(),
    )

# %% [markdown]
# In the second group all answers are wrong, and only their lengths differ. After standardizing, being brief counts as
# much as being right. `algorithm.min_reward_range` leaves such groups out.
#
# ## 4. Log-probabilities: $\log \pi_\theta(a_{i,t} \mid s_{i,t})$, where $s_{i,t} = (x, a_{i,<t})$
#
# The token at position $p$ is predicted at position $p - 1$. If a first implementation is wrong, it is usually in this
# shift.


# %%
def compute_logprobs(model, prompt_ids, responses):
    """Return log-probabilities [G, T] of the response tokens, and [G, T, V] of all tokens at these positions."""
    length = responses.shape[1]
    ids = torch.cat([torch.tensor([prompt_ids] * len(responses)), responses], 1)
    logits = model(ids, logits_to_keep=length + 1).logits[:, :-1].float()
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, responses[..., None])[..., 0], log_probs


with torch.no_grad():
    logpi_old, _ = compute_logprobs(policy, prompt_ids, responses)  # fixed from now on
    logpi_ref, _ = compute_logprobs(reference, prompt_ids, responses)
print("mean log-probability of a token:", float((logpi_old * mask).sum() / mask.sum()))

# %% [markdown]
# ## 5. Ratio and clip
#
# $$\rho_{i,t} = \exp(\log \pi_\theta - \log \pi_{old}) \qquad
#   L^{clip}_{i,t} = \min(\rho_{i,t} A_i,\ \mathrm{clip}(\rho_{i,t}, 1 - \epsilon, 1 + \epsilon) A_i)$$
#
# In the first step $\pi_\theta = \pi_{old}$, so every ratio is 1. (The quotient of two *log-probabilities* is not this
# ratio: both are negative, and its gradient makes rewarded answers less likely.)


# %%
def clipped_objective(logpi, logpi_old, advantages, clip_eps):
    ratio = torch.exp(logpi - logpi_old)
    return torch.min(ratio * advantages[:, None], ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages[:, None])


logpi, log_probs = compute_logprobs(policy, prompt_ids, responses)
print("largest |ratio - 1|:", float(((logpi.detach() - logpi_old).exp() - 1).abs().mul(mask).max()))

# %% [markdown]
# ## 6. Two ways to add up the tokens
#
# $$\frac1G \sum_i \frac1{T_i} \sum_t L_{i,t} \qquad\text{or}\qquad \frac{\sum_i \sum_t L_{i,t}}{\sum_i T_i}$$
#
# The first form gives each response the same weight, so a token of a long answer counts less. The second gives each
# token the same weight. At ratio 1 the first loss is exactly $-\overline{A} = 0$; the second is not 0 if lengths and
# rewards are correlated. Neither value shows whether training works.


# %%
def mean_over_responses(x, mask):
    return ((x * mask).sum(1) / mask.sum(1)).mean()


def mean_over_tokens(x, mask):
    return (x * mask).sum() / mask.sum()


advantages = standardize(torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64)).float()
objective = clipped_objective(logpi, logpi_old, advantages, 0.2)
for take_mean in (mean_over_responses, mean_over_tokens):
    print(f"{take_mean.__name__:20}", float(-take_mean(objective, mask).detach()))

# %% [markdown]
# ## 7. Entropy: $H = -\sum_a \pi(a) \log \pi(a)$
#
# The sum over the whole vocabulary is exact. A coefficient above 0 rewards the policy for keeping its entropy.

# %%
entropy = -(log_probs.exp() * log_probs).sum(-1)
print("mean entropy of a token, in nats:", float(mean_over_tokens(entropy, mask).detach()))

# %% [markdown]
# ## 8. KL, and why k1 in the loss does nothing
#
# $\log \pi - \log \pi_{ref}$ of a sampled token is an unbiased estimate of the KL divergence. As a *term of the loss*
# its gradient is $\nabla \log \pi$, without the reference. The mean of this gradient is 0, since
# $\mathbb E_\pi[\nabla \log \pi] = \sum_a \nabla \pi(a) = \nabla 1 = 0$. Only noise remains.
#
# With a vocabulary of three tokens, the sums can be computed exactly. The next cell compares, for a policy that has
# moved away from its reference, the gradient of the KL with the expected gradients of k1 in the loss, of k2 in the
# loss, $\frac12 (\log \pi - \log \pi_{ref})^2$, and of k1 in the reward, where it multiplies $\nabla \log \pi$ as a
# reward does.

# %%
theta = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
ref = torch.tensor([0.0, 0.5, 0.0], dtype=torch.float64).log_softmax(-1)


def expected_gradient(compute_loss):
    """Return the mean gradient of a loss of a sampled token. The probabilities sample, so they have no gradient."""
    log_pi = theta.log_softmax(-1)
    return torch.autograd.grad((log_pi.detach().exp() * compute_loss(log_pi)).sum(), theta)[0]


log_pi = theta.log_softmax(-1)
exact = torch.autograd.grad((log_pi.exp() * (log_pi - ref)).sum(), theta)[0]
gradients = {
    "KL itself": exact,
    "k1 in the loss": expected_gradient(lambda log_pi: log_pi - ref),
    "k2 in the loss": expected_gradient(lambda log_pi: (log_pi - ref).square() / 2),
    "k1 in the reward": expected_gradient(lambda log_pi: (log_pi - ref).detach() * log_pi),
}
for name, gradient in gradients.items():
    print(f"{name:17}", [round(x, 6) + 0.0 for x in gradient.tolist()])
assert torch.allclose(gradients["k1 in the loss"], torch.zeros(3, dtype=torch.float64), atol=1e-12)
assert torch.allclose(gradients["k2 in the loss"], exact) and torch.allclose(gradients["k1 in the reward"], exact)

# %% [markdown]
# So the KL becomes a part of the advantage here, outside the division by $\sigma$. The KL of each answer is compared
# with the mean of the others:
#
# $$A_i = \frac{r_i - \mu}{\sigma} - \beta \Bigl(K_i - \frac{1}{G - 1} \sum_{j \ne i} K_j\Bigr) \qquad
#   K_i = \sum_t (\log \pi_{old} - \log \pi_{ref})$$
#
# ## 9. The loop


# %%
def update(optimizer, prompt_ids, responses, mask, logpi_old, advantages, clip_eps=0.2, ent_coef=0.0, epochs=2):
    """Take `epochs` steps on the same answers. Return the share of tokens with a ratio outside the clip at the end."""
    for _ in range(epochs):
        logpi, log_probs = compute_logprobs(policy, prompt_ids, responses)
        objective = clipped_objective(logpi, logpi_old, advantages.float(), clip_eps)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        loss = -mean_over_tokens(objective + ent_coef * entropy, mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    is_outside = (torch.exp(logpi.detach() - logpi_old) - 1).abs() > clip_eps
    return float(mean_over_tokens(is_outside.float(), mask))


def train(prompts, steps, group_size, max_new_tokens, lr, kl_coef):
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        prompt = prompts[step % len(prompts)]
        prompt_ids = encode(prompt)
        responses, mask = sample_group(prompt_ids, group_size, max_new_tokens)
        texts = decode_responses(responses, mask)
        rewards = grade_texts(prompt, texts)
        with torch.no_grad():
            logpi_old, _ = compute_logprobs(policy, prompt_ids, responses)
            logpi_ref, _ = compute_logprobs(reference, prompt_ids, responses)
        kl = ((logpi_old - logpi_ref) * mask).sum(1).double()
        others = (kl.sum() - kl) / (group_size - 1)
        advantages = standardize(rewards) - kl_coef * (kl - others)
        clip_frac = update(optimizer, prompt_ids, responses, mask, logpi_old, advantages)
        best = int(rewards.argmax())
        print(
            f"step {step:2d}  reward {rewards.mean():+.3f} std {rewards.std(correction=0):.3f}  "
            f"KL {float(kl.sum() / mask.sum()):+.4f}  clipped {clip_frac:.2f}  "
            f"best {rewards[best]:+.2f} {texts[best]!r}"
        )


@torch.no_grad()
def chat(prompt):
    """Return the greedy answer."""
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
