"""The search as a study of Optuna: distributions, past trials, and the importance of each searched field."""

import math
import warnings
from collections.abc import Iterable

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from jaxrl_atari.report.search_records import Record
from jaxrl_atari.search.space import Choice, Distribution, Grid, Integer, LogUniform, SearchConfig, Uniform

optuna.logging.set_verbosity(optuna.logging.WARNING)


def optuna_distribution(distribution: Distribution) -> BaseDistribution:
    """The equivalent distribution of Optuna."""
    match distribution:
        case Uniform(low, high):
            return FloatDistribution(low, high)
        case LogUniform(low, high):
            return FloatDistribution(low, high, log=True)
        case Integer(low, high):
            return IntDistribution(int(low), int(high))
        case Choice(values) | Grid(values):
            return CategoricalDistribution(values)


def optuna_distributions(search: SearchConfig) -> dict[str, BaseDistribution]:
    """Searched field -> its distribution."""
    return {name: optuna_distribution(distribution) for name, distribution in search.space.items()}


def past_study(
    search: SearchConfig, records: Iterable[Record], sampler: optuna.samplers.BaseSampler | None = None
) -> optuna.Study:
    """A study with the fields and scores of the trials that finished, or that ASHA stopped."""
    distributions = optuna_distributions(search)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for record in records:
        if record.score is not None and record.status in ("finished", "stopped"):
            past = {"params": record.fields, "distributions": distributions, "value": record.score}
            study.add_trial(optuna.trial.create_trial(state=TrialState.COMPLETE, **past))
    return study


def importances(search: SearchConfig, records: Iterable[Record]) -> dict[str, float]:
    """Searched field -> its share in what sets the best trials apart from all others, largest first; the sum is 1.

    By PED-ANOVA (Watanabe et al. 2023, arXiv:2304.10255). The best trials are the best tenth, but at least five where
    that is at most half. Empty for fewer than four trials with a score, and where the scores set no trials apart.
    """
    study = past_study(search, records)
    count = len(study.trials)
    if count < 4:
        return {}
    quantile = max(0.1, min(0.5, 5 / count))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=quantile)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # Optuna's, where scores are too equal: it returns equal shares
            shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    except UserWarning:
        return {}
    return shares if all(map(math.isfinite, shares.values())) else {}
