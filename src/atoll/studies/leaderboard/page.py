"""Write the page of the leaderboard from its rows: `atoll leaderboard --page FILE`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.core.errors import counted
from atoll.present.chart import Chart
from atoll.present.tables import Table, markdown
from atoll.studies.leaderboard.leagues import DEVELOPMENT, GROUPS, Recipe
from atoll.studies.leaderboard.rows import Row
from atoll.studies.leaderboard.standings import (
    BASE,
    against_table,
    rank_chart,
    rank_methods,
    rank_table,
    result_tables,
    rows_of,
)

RIVALS = 5  # methods in the example command for another set
FEW = 4  # maximum number of names in a list; above, only their number
HEAD = "<!-- Written by `atoll leaderboard --page FILE`; tests compare it with leaderboard.csv. -->"
ROWS = """\
[leaderboard.csv](leaderboard.csv) contains every row with its command and every seed's score.
Click a heading to sort a table.
`louvain-10` is a Louvain partition into 10 clients, and so on.
*Homophilous* and *heterophilous* are mean ranks over data sets of this kind.
*Mean score* is the mean over all problems in percent, and *MB/round* the traffic of all clients."""


def league_tables(
    rows: Sequence[Row], recipe: Recipe, league: str, reference: str
) -> Iterator[tuple[str, list[Table]]]:
    """Yield each group of sets with its tables: ranks, tests, and scores by partition."""
    for group in GROUPS:
        if own := rows_of(rows, recipe, league, group):
            both = rank_table(own, recipe), against_table(own, reference)
            yield group, [*(one for one in both if one is not None), *result_tables(own, recipe)]


def answer(rows: Sequence[Row], recipe: Recipe, league: str, reference: str) -> str:
    """State the first method on the development sets, and how the reference compares."""
    title = recipe.leagues[league].title
    found = rank_methods(rows_of(rows, recipe, league, DEVELOPMENT))
    if found is None:
        return f"League *{title}*: not run yet on the development sets."
    low, high = found.intervals[:, 0]
    about = [f"95 % interval {low:.1f} to {high:.1f}"] if found.sets > 1 else []
    about.append(counted(found.sets, "set"))
    if found.excluded:
        count = len(found.problems)
        about.append(f"{count} of {counted(count + found.excluded, 'problem')}")
    first = f"{found.methods[0]} is first by mean rank, {found.mean_ranks[0]:.1f} of "
    first += f"{len(found.methods)}\n  ({', '.join(about)})"
    if not (tests := found.comparisons(reference)):
        return f"League *{title}*: {first}. `{reference}` was not run."
    gain = next((-100 * (test.points or 0) for test in tests if test.name == BASE), None)
    beaten = [test for test in tests if test.sign < 0]
    better = [test.name for test in tests if test.sign > 0]
    alike = [test.name for test in tests if test.sign == 0]
    second = f"`{reference}` is better than {len(beaten)} of {len(tests)} other methods"
    worst = max([max(test.by_problem, test.by_set) for test in beaten], default=0.0)
    second += f" (p = {worst:.3f} at most, each data set counted once)" if beaten else ""
    second += f", not distinguishable from {_listed(alike)}" if alike else ""
    second += f", and worse than {_listed(better)}" if better else ""
    last = ""
    if gain:
        more = "more" if gain > 0 else "less"
        last = f"\n  On average it has {abs(gain):.1f} points {more} than `{BASE}`."
    return f"League *{title}*: {first}.\n  {second}.{last}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= FEW else f"{len(names)} others"


def _of_page(rows: Sequence[Row], recipe: Recipe) -> list[Row]:
    wanted = recipe.run["rounds"], recipe.run["epochs"]
    return [row for row in rows if (row.rounds, row.epochs) == wanted]


def picture(rows: Sequence[Row], recipe: Recipe, reference: str = "reef") -> Chart | None:
    """Draw the mean ranks of the first league on the development sets, if it has rows."""
    own = _of_page(rows, recipe)
    found = rank_methods(rows_of(own, recipe, next(iter(recipe.leagues)), DEVELOPMENT))
    return None if found is None else rank_chart(found, reference)


def page_text(
    rows: Sequence[Row], recipe: Recipe, reference: str = "reef", image: str = "leaderboard.png"
) -> str:
    """Write the page in Markdown. Skip rows with other rounds or epochs than the recipe.

    `image` is the file of `picture`, relative to the page.
    """
    run, own = recipe.run, _of_page(rows, recipe)
    lines, drawn = ["# Leaderboard", "", HEAD, ""], picture(own, recipe, reference)
    lines += [f"- {answer(own, recipe, name, reference)}" for name in recipe.leagues]
    if not own:
        lines[4:] = ["**Not run yet**: the ranking needs rows."]
    sets = [name for name, one in recipe.sets.items() if one.development]
    frozen = f"was frozen in commit {recipe.frozen}" if recipe.frozen else "is not frozen yet"
    lines += [
        "",
        f"Protocol `{run['protocol']}`, {run['rounds']} rounds of {run['epochs']} epochs.",
        "Seeds vary partition, split and initialisation.",
        "The designers of Reef knew the test scores of the development sets:",
        f"{', '.join(sets)}.",
        f"Reef's design {frozen}. It was scored on the further sets only after that.",
        "",
        *([ROWS, ""] if own else []),
        *([f"![{drawn.alt}]({image})", ""] if drawn else []),
    ]
    for name in recipe.leagues:
        lines += _league(own, recipe, name, reference)
    return "\n".join([*lines, *_another_set(own, recipe, reference), ""])


def _console(why: str, *commands: str) -> list[str]:
    shown = [f"$ {command}" for command in commands]
    return [f"<!-- not run: {why} -->", "```console", *shown, "```", ""]


def _league(rows: Sequence[Row], recipe: Recipe, name: str, reference: str) -> Iterator[str]:
    league = recipe.leagues[name]
    seeds = ", ".join(f"{count} for {part}" for part, count in league.seeds.items())
    yield from (f"## {league.title}", "", league.about, f"Seeds: {seeds}.", "")
    yield from _console("a GPU and data", f"atoll leaderboard --league {name} --minutes 20")
    own = [row for row in rows if row.league == name]
    if not own:
        yield from ("Not run yet.", "")
        return
    yield from ("One row of each partition:", "")
    last = sorted(own, key=lambda row: row.method == reference)  # prefer the reference's command
    yield from _console("data", *{row.partition: row.command for row in last}.values())
    for group, tables in league_tables(own, recipe, name, reference):
        yield from (f"### {league.title}: {group}", "")
        for table in tables:
            yield from ('<div class="sortable" markdown>', "", markdown(table), "</div>", "")


def _another_set(rows: Sequence[Row], recipe: Recipe, reference: str) -> Iterator[str]:
    """Write the command that runs the reference and its best rivals on another set."""
    found = rank_methods(rows_of(rows, recipe, next(iter(recipe.leagues)), DEVELOPMENT))
    rivals = [name for name in found.methods if name != reference][:RIVALS] if found else []
    words = f"{reference} and its {len(rivals)} best rivals" if rivals else "some methods"
    names = ",".join([reference, *(rivals or ["fedavg", "fedprox"])])
    yield from ("## Another set", "")
    yield from (f"This command runs {words} on another set; give a path for your own data.", "")
    command = f"atoll leaderboard --data tolokers --methods {names} --data-root DIR"
    yield from _console("data", f"{command} --csv other.csv")[:-1]
