"""Lists that help texts name in braces, such as {metrics}: what registries know when the help is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headscope.config.engines import engine_list, export_list, goal_list, quantization_list
from headscope.engine.declarations import metric_names, objective_names
from headscope.pruning.options.learn import learners

LISTS: Mapping[str, Callable[[], list[str]]] = {
    "{objectives}": objective_names,
    "{prompt_objectives}": lambda: objective_names(prompts=True),
    "{metrics}": metric_names,
    "{learners}": lambda: list(learners()),
    "{priced}": lambda: [name for name, learner in learners().items() if learner.priced],
    "{gate_rates}": lambda: [f"{learner.gate_lr:g} ({name})" for name, learner in learners().items()],
    "{engines}": engine_list,
    "{exports}": export_list,
    "{engines_later}": lambda: engine_list(later=True),
    "{quantizations}": quantization_list,
    "{goals}": goal_list,
}


def filled(text: str) -> str:
    """A help text with its lists."""
    for name, known in LISTS.items():
        text = text.replace(name, ", ".join(known())) if name in text else text
    return text
