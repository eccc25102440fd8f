"""What users write when they are not lucky: a reward and a rollout that fail, always."""


def reward(prompts, completions, **columns):
    raise KeyError("solution")


async def rollout(prompt, sample):
    raise KeyError("hint")
