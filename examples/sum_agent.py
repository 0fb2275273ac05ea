"""An agent that adds two numbers and may try again: OpenAI's client and three variables of its environment are all it knows."""

import argparse
import json
import os
import random

import openai


def main() -> None:
    """Ask for a sum until it is right or all tries are used; the reward is 1 for the first one, less for later ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=1)
    tries: int = parser.parse_args().tries
    with open(os.environ["RLJOB_TASK"], encoding="utf-8") as file:
        numbers = random.Random(json.load(file)["seed"])
    first, second = numbers.randint(10, 99), numbers.randint(10, 99)
    client = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are set
    talk: list[dict[str, str]] = [{"role": "user", "content": f"Calculate {first} + {second}."}]
    reward, used = 0.0, 0
    for used in range(1, tries + 1):
        said = client.chat.completions.create(model="policy", messages=talk).choices[0].message.content or ""
        if said.strip() == str(first + second):
            reward = 1.0 / used
            break
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Calculate {first} + {second}."}]
    with open(os.environ["RLJOB_REWARD_FILE"], "w", encoding="utf-8") as file:
        json.dump({"reward": reward, "metrics": {"success": float(reward > 0), "tries": used}}, file)


if __name__ == "__main__":
    main()
