"""Random conformance cases (docs/placement.md), right and wrong ones of every kind, for comparison with RLinf's own planner."""

from __future__ import annotations

import random
from typing import Any

ROBOTS = ("Franka", "DualFranka", "DOSW1", "GimArm", "Turtle2")
Case = dict[str, Any]


def cases(seed: int, count: int) -> list[Case]:
    """``count`` cases; the same ones for the same seed."""
    rng = random.Random(seed)
    kinds = (
        "hybrid",
        "component",
        "packed",
        "flexible",
        "node",
        "model_parallel",
        "model_parallel_eval",
        "multi_agent",
        "multi_agent_eval",
        "parse_rank",
    )
    weights = (6, 1, 3, 3, 2, 6, 1, 2, 1, 1)
    return [_Generator(rng).case(f"random-{seed}-{index}", rng.choices(kinds, weights)[0]) for index in range(count)]


class _Generator:
    """One case."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_nodes = rng.choice((1, 1, 2, 2, 3, 4, 5))
        if rng.random() < 0.6:
            self.counts = [rng.choice((2, 4, 8, 8))] * self.num_nodes
        else:
            self.counts = [rng.choice((0, 0, 1, 2, 3, 4, 8)) for _ in range(self.num_nodes)]
        self.labels: list[str] = []
        self.units: dict[str, int] = {"cluster": sum(self.counts) or self.num_nodes, "node": self.num_nodes}
        self.robots = [0] * self.num_nodes

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def case(self, name: str, kind: str) -> Case:
        if kind == "parse_rank":
            return {"name": name, "kind": kind, **self.parse_rank()}
        case: Case = {"name": name, "kind": kind, "cluster": self.hardware()}
        groups = self.groups() if self.chance(0.55) else None
        if kind in ("packed", "flexible", "node"):
            if groups is not None:
                case["config"] = {"cluster": {"component_placement": {}, "node_groups": groups}}
            case["strategy_args"] = getattr(self, kind)()
        else:
            cluster: Case = {"component_placement": getattr(self, f"components_{'free' if kind in ('hybrid', 'component') else kind}")()}
            if groups is not None:
                cluster["node_groups"] = groups
            if self.chance(0.06):
                cluster["num_nodes"] = self.rng.choice((self.num_nodes, max(1, self.num_nodes - 1), self.num_nodes + 1, 0, "2"))
            case["config"] = {"cluster": cluster} | (self.sizes(cluster) if kind not in ("hybrid", "component") else {})
        if self.chance(0.1):
            case["isolate_accelerator"] = False
        return case

    def hardware(self) -> Case:
        if self.chance(0.7):
            same = len(set(self.counts)) == 1
            return {
                "num_nodes": self.num_nodes,
                "accelerators_per_node": self.counts[0] if same and self.chance(0.8) else list(self.counts),
            }
        nodes: list[Case] = [{"accelerators": count, "node_rank": index} for index, count in enumerate(self.counts)]
        if self.chance(0.3):
            for node in nodes:
                node["node_rank"] = self.rng.choice((None, 0, 1, -1, node["node_rank"], "1", "a")) if self.chance(0.5) else None
        if self.chance(0.3):
            self.rng.shuffle(nodes)
        if self.chance(0.2):
            for node in nodes:
                node["accel_type"] = self.rng.choice(("NV_GPU", "AMD_GPU", "NPU"))
        if self.chance(0.1):
            self.rng.choice(nodes)["env"] = {"ROBOT_IP": "10.0.0.5,10.0.0.6"[: self.rng.choice((8, 17))]}
        case: Case = {"nodes": nodes}
        if self.chance(0.2):
            case["head"] = self.rng.randrange(self.num_nodes)
        return case

    def ranks(self, count: int) -> str:
        """Some of 0 .. count-1 as text, at times wrong."""
        if self.chance(0.2):
            return self.rng.choice(("all", "ALL"))
        start = self.rng.randrange(max(count, 1))
        end = self.rng.randrange(start, max(count, 1)) if not self.chance(0.08) else start + self.rng.choice((-1, count))
        return str(start) if start == end and self.chance(0.7) else f"{start}-{end}"

    def groups(self) -> list[Case]:
        groups = []
        order = list(range(self.num_nodes))
        for label in self.rng.sample(("a800", "4090", "g", "cpu", "bots", "x"), self.rng.choice((1, 2, 2, 3))):
            start = self.rng.choice(order)
            nodes = list(range(start, self.rng.randrange(start, self.num_nodes) + 1))
            if self.chance(0.15):
                nodes = sorted(self.rng.sample(order, self.rng.randint(1, self.num_nodes)))
            written: Any = ",".join(map(str, nodes)) if self.chance(0.5) else f"{nodes[0]}-{nodes[-1]}"
            if self.chance(0.04):
                written = self.rng.choice((nodes, nodes[0], "all", "9", "", "0-", "1-0"))
            group: Case = {"label": int(label) if label == "4090" and self.chance(0.5) else label, "node_ranks": written}
            self.decorate(group, nodes)
            groups.append(group)
            self.labels.append(label)
            accelerators = sum(self.counts[node] for node in nodes)
            if "hardware" in group:
                self.units[label] = len(group["hardware"]["configs"]) if isinstance(group["hardware"], dict) else 1
            else:
                self.units[label] = len(nodes) if group.get("ignore_hardware") or not accelerators else accelerators
        if self.chance(0.03):
            groups.append(dict(groups[0]))
        if self.chance(0.03):
            groups[-1]["label"] = self.rng.choice(("node", "cluster"))
        return groups

    def decorate(self, group: Case, nodes: list[int]) -> None:
        if self.chance(0.2):
            kind = self.rng.choice(ROBOTS)
            configs = self.robot_configs(kind, nodes)
            group["hardware"] = {"type": kind if not self.chance(0.04) else "Accelerator", "configs": configs}
        elif self.chance(0.2):
            group["ignore_hardware"] = self.chance(0.8)
        elif self.chance(0.1):
            group["hardware_type"] = self.rng.choice(("Accelerator", "Franka", "Bogus"))
        if self.chance(0.15):
            group["env_configs"] = self.environments(nodes)
        if self.chance(0.02):
            group["nope"] = 1

    def robot_configs(self, kind: str, nodes: list[int]) -> list[Case]:
        configs: list[Case] = []
        for index in range(self.rng.randint(1, 3)):
            config: Case = {"node_rank": self.rng.choice(nodes)}
            if kind == "Franka":
                config |= {"robot_ip": f"10.1.{self.rng.randrange(3)}.{index}"}
            elif kind == "GimArm":
                config |= {"can_interface": f"can{self.rng.randrange(3)}"}
            elif kind == "DOSW1":
                config |= {"robot_url": f"h{self.rng.randrange(3)}"}
            if self.chance(0.2):
                config["camera_serials"] = []
            configs.append(config)
        if self.chance(0.06):
            configs[0][self.rng.choice(("nope", "robot_ip", "arm_variant"))] = "x"
        if self.chance(0.03):
            configs[0].pop("node_rank")
        return configs

    def environments(self, nodes: list[int]) -> list[Case]:
        entries: list[Case] = [{"node_ranks": str(node), "env_vars": [{f"V{node}": node}]} for node in nodes]
        if self.chance(0.2):
            entries[-1]["node_ranks"] = str(self.rng.randrange(self.num_nodes))
        if self.chance(0.1):
            entries[-1]["env_vars"] = self.rng.choice(([{"A": 1, "B": 2}], {"A": 1}, [{"A": 1}, {"A": 2}]))
        if self.chance(0.1):
            entries[-1]["python_interpreter_path"] = "/opt/python"
        return entries

    def label(self) -> str:
        pool = [*self.labels, "cluster", "node"]
        if self.chance(0.03):
            return "unknown"
        return self.rng.choice(pool if self.chance(0.4) or not self.labels else self.labels)

    def rank_map(self, count: int, simple: bool = False) -> str:
        """A rank map over ``count`` units, mostly right."""
        if self.chance(0.15):
            return "all"
        if self.chance(0.03):
            return self.rng.choice(
                (
                    "",
                    ",",
                    "-1",
                    "0-1-2",
                    "1-0",
                    "0:all",
                    "0:ALL",
                    "all:all",
                    ":0",
                    "0:",
                    "a",
                    "0:0:0",
                    "0,0",
                    "1,0",
                    " 0 - 1 ",
                    "+0",
                    "1_0",
                    "99",
                    "0.5",
                )
            )
        position, process = self.rng.choice((0, 0, self.rng.randrange(max(count, 1)))), 0
        parts: list[str] = []
        for _ in range(1 if simple else self.rng.choice((1, 1, 2, 3))):
            if position >= count:
                break
            size = self.rng.choice((1, 2, 2, 4, 4, 8, count - position))
            end = min(position + size, count) - 1
            text = str(position) if position == end and self.chance(0.7) else f"{position}-{end}"
            size = end - position + 1
            if not simple and self.chance(0.35):
                divisors = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
                number = self.rng.choice(divisors) if self.chance(0.6) else size * self.rng.choice((1, 2, 3))
                if self.chance(0.05):
                    number += 1
                if self.chance(0.04):
                    process += self.rng.choice((-1, 1))
                process = max(process, 0)
                text += f":{process}" if number == 1 else f":{process}-{process + number - 1}"
                process += number
            else:
                process += size
            parts.append(text)
            position = end + 1 + self.rng.choice((0, 0, 0, 1, -1 if self.chance(0.1) else 0))
        return self.rng.choice((",", ",", ", ")).join(parts) or "0"

    def placed(self, simple: bool = False, grouped: float = 0.6) -> Any:
        if not self.chance(grouped):
            return self.rank_map(self.units["cluster"], simple)
        labels = [self.label()]
        while self.chance(0.25):
            labels.append(self.label())
        count = sum(self.units.get(label, 1) for label in labels)
        group: Any = ",".join(labels) if not self.chance(0.05) else labels
        value: Case = {"node_group": group, "placement": self.rank_map(count, simple)}
        if self.chance(0.02):
            value["extra"] = 1
        if self.chance(0.01):
            value.pop("placement")
        return value

    def components_free(self) -> Case:
        names = self.rng.sample(("actor", "rollout", "env", "reward", "critic", "agent"), self.rng.randint(1, 3))
        section = {name: self.placed() for name in names}
        if self.chance(0.2):
            section[f"{names[0]}2,{names[0]}3"] = self.placed()
        if self.chance(0.02):
            section[f"{names[0]},z"] = "0"
        return section

    def components_model_parallel(self) -> Case:
        total = self.units["cluster"]
        style = self.rng.choice(("collocated", "apart", "apart", "apart", "free"))
        if style == "collocated":
            units = self.rank_map(total, simple=True)
            group = self.rng.choice(self.labels) if self.labels and self.chance(0.1) else None
            value: Any = units if group is None else {"node_group": group, "placement": self.rank_map(self.units[group], simple=True)}
            section = (
                {"actor,rollout": value, "reward": self.rank_map(total, simple=True)}
                if self.chance(0.4)
                else {"actor,rollout,reward": value}
            )
            if self.chance(0.2):
                section["critic"] = self.rank_map(total, simple=True)
            if self.chance(0.05):
                section["inference"] = self.rank_map(total, simple=True)
            return section
        names = ["actor", "rollout"]
        if self.chance(0.4):
            names.append(self.rng.choice(("inference", "inference", "actor_inference")))
        if self.chance(0.25):
            names.append("critic")
            if self.chance(0.5):
                names.append("critic_inference")
        if self.chance(0.3):
            self.rng.shuffle(names)
        section = {}
        position = 0 if self.chance(0.8) else 1
        for index, name in enumerate(names):
            rest = total - position
            if (style == "free" and self.chance(0.3)) or rest <= 0:
                section[name] = self.rank_map(total, simple=True)
                continue
            size = rest if index == len(names) - 1 and self.chance(0.7) else min(rest, self.rng.choice((1, 2, 2, 4, 4, 3)))
            section[name] = f"{position}-{position + size - 1}" if size > 1 else str(position)
            position += size + (self.rng.choice((0, 1)) if self.chance(0.1) else 0)
        if not self.chance(0.03):
            section["reward"] = self.rank_map(total, simple=True)
        if self.chance(0.05):
            section.pop(self.rng.choice(list(section)))
        return section

    def components_model_parallel_eval(self) -> Case:
        total = self.units["cluster"]
        return {"rollout": self.rank_map(total, simple=self.chance(0.8))} | ({"reward": self.rank_map(total)} if self.chance(0.95) else {})

    def components_multi_agent(self) -> Case:
        total = self.units["cluster"]
        block = self.rank_map(total, simple=True)
        section: Case = {"actor,reward": block} if self.chance(0.85) else {"actor": block, "reward": self.rank_map(total, simple=True)}
        section["rollout"] = block if self.chance(0.4) else self.rank_map(total, simple=True)
        for name in self.rng.sample(("rollout_worker", "planner", "worker", "inference"), self.rng.randrange(3)):
            section[name] = self.rank_map(total, simple=True)
        return section

    def components_multi_agent_eval(self) -> Case:
        return self.components_model_parallel_eval() | ({"planner": self.rank_map(self.units["cluster"])} if self.chance(0.5) else {})

    def sizes(self, cluster: Case) -> Case:
        actor = {"tensor_model_parallel_size": self.rng.choice((1, 1, 2, 2, 4, 8, 3))}
        if self.chance(0.4):
            actor |= {"context_parallel_size": self.rng.choice((1, 1, 2)), "pipeline_model_parallel_size": self.rng.choice((1, 1, 1, 2))}
        rollout = {"tensor_parallel_size": self.rng.choice((1, 1, 2, 2, 4, 3))}
        if self.chance(0.5):
            rollout["pipeline_parallel_size"] = 1 if self.chance(0.85) else 2
        config: Case = {"actor": {"model": actor}, "rollout": rollout, "algorithm": {"recompute_logprobs": self.chance(0.9)}}
        if self.chance(0.4):
            config[self.rng.choice(("inference", "inference", "actor_inference"))] = {
                "model": {"tensor_model_parallel_size": self.rng.choice((1, 1, 2, 4))} if self.chance(0.7) else {}
            }
        config["critic"] = {"model": {"tensor_model_parallel_size": self.rng.choice((1, 1, 2))}}
        if self.chance(0.2):
            config["critic_inference"] = {"model": {"tensor_model_parallel_size": self.rng.choice((1, 2))}}
        if self.chance(0.3):
            cluster["auto_scheduler"] = True
            if self.chance(0.3):
                cluster["use_pre_process_policy"] = True
        return config

    def strategy_labels(self) -> Any:
        labels = [self.label()]
        while self.chance(0.35):
            labels.append(self.label())
        return labels if len(labels) > 1 or self.chance(0.5) else labels[0]

    def selected(self, labels: Any) -> int:
        return sum(self.units.get(label, 1) for label in ([labels] if isinstance(labels, str) else labels or ["cluster"]))

    def packed(self) -> Case:
        labels = self.strategy_labels() if self.chance(0.5) else None
        count = self.selected(labels)
        size, stride = self.rng.choice((1, 1, 2, 2, 4, 3)), self.rng.choice((1, 1, 1, 2, 4))
        start = self.rng.choice((0, 0, 0, 1, 2, count // 2))
        blocks = max((count - start) // (size * stride), 0)
        number = self.rng.randint(1, blocks) if blocks else 1
        end = start + number * size * stride - 1 + (self.rng.choice((-1, 1, 8)) if self.chance(0.1) else 0)
        arguments: Case = {"start_hardware_rank": start, "end_hardware_rank": end, "num_hardware_per_process": size, "stride": stride}
        return arguments | ({"node_group": labels} if labels is not None else {})

    def flexible(self) -> Case:
        labels = self.strategy_labels() if self.chance(0.5) else None
        count = self.selected(labels)
        lists = []
        for _ in range(self.rng.randint(0 if self.chance(0.05) else 1, 5)):
            first = self.rng.randrange(max(count, 1))
            ranks = list(range(first, min(first + self.rng.choice((1, 1, 2, 3)), count))) or [0]
            if self.chance(0.2):
                self.rng.shuffle(ranks)
            if self.chance(0.04):
                ranks.append(self.rng.choice((ranks[0], count, -1)))
            if self.chance(0.01):
                ranks = []
            lists.append(ranks)
        return {"hardware_ranks_list": lists} | ({"node_group_label": labels} if labels is not None else {})

    def node(self) -> Case:
        labels = self.strategy_labels() if self.chance(0.6) else None
        ranks = [self.rng.randrange(self.num_nodes) for _ in range(self.rng.randint(0 if self.chance(0.05) else 1, 5))]
        if self.chance(0.05):
            ranks.append(self.rng.choice((-1, 99)))
        return {"node_ranks": ranks} | ({"node_group_label": labels} if labels is not None else {})

    def parse_rank(self) -> Case:
        parts = [self.ranks(6) for _ in range(self.rng.randint(0, 3))]
        config: Any = self.rng.choice((",", ", ", ",,")).join(parts)
        if self.chance(0.15):
            config = self.rng.choice(("all", "aLL", 3, "", ",", None, [0], " 1 ", "1-", "-", "a", "+1", "1.0", True))
        available = self.rng.choice((None, list(range(6)), [0, 2, 4], [3, 1], []))
        return {"rank_config": config, "available_ranks": available, "rank_type": "node"}
