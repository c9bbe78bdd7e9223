"""What a page of a report shows. Each kind of page has its own values, and all have those of settings.html."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_atari.config import Config, flat
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.runs.description import resumes


class PageContent(NamedTuple):
    """What the page of a run, a suite or a search shows."""

    config: Config
    description: Mapping[str, Any]  # the content of config.json, suite.json or search.json
    values: dict[str, Any]  # for the template of this kind of page
    runs: Sequence[str] = ()  # the runs in a suite or a search, by the names of their directories


def settings_values(content: PageContent) -> dict[str, Any]:
    """The values of settings.html: the config, the software and hardware, and what each resume has changed.

    `comparison_note` is for the pages that show reference scores.
    """
    config = content.config
    usual = flat(Config().to_dict())
    software = {name: content.description.get(name) for name in ("python", "versions", "git_revision", "hardware")}
    return {
        "config": config,
        "comparison_note": comparison_note(config.env.resolved_protocol),
        "options": [(name, value, usual.get(name)) for name, value in flat(config.to_dict()).items()],
        "software": flat(software),
        "changes": _changes(content.description),
    }


def _changes(description: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The options that each resume changed, as rows of text (resume, change)."""
    return [
        (f"resumed {resume.get('date')}", f"{name}: {' -> '.join(map(str, values))}")
        for resume in resumes(description)
        for name, values in resume["changed"].items()
    ]
