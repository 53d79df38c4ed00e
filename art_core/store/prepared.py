"""Statements of every rollout, compiled once and handed straight to the database's driver.

Invariant: what is executed is what SQLAlchemy compiles for the dialect, with values converted by its types.

SQLAlchemy's way from a statement to its driver costs several times what SQLite takes to execute it, and is
paid in the process that runs the agents.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Dialect

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A statement for one dialect.

    Attributes:
        names: of the parameters, in the statement's order.
        converters: by name, for values that the driver takes in another form.
        constants: parameters that are part of the statement.
        positional: whether the driver takes values in order, or by name.
    """

    sql: str
    names: tuple[str, ...]
    converters: tuple[tuple[str, Callable[[Any], Any]], ...]
    constants: Row
    positional: bool

    def values(self, row: Row) -> Any:
        given = {**row, **self.constants}
        for name, convert in self.converters:
            given[name] = convert(given[name])
        return tuple([given[name] for name in self.names]) if self.positional else given


class Prepared:
    """A statement that is compiled when a dialect, and rows with these names, first meet it.

    Args:
        statement: makes it, given the dialect's name (databases differ in how to pass over known rows).
    """

    def __init__(self, statement: Callable[[str], Any]) -> None:
        self._statement = statement
        self._compiled: dict[tuple[str, ...], _Compiled] = {}

    def execute(self, connection: Connection, rows: Sequence[Row]) -> int:
        """Execute it for each row; returns how many rows of the database it touched.

        Args:
            connection: to the database.
            rows: values by the names of columns and parameters; the same names in each.

        Raises:
            SQLAlchemyError: the database refuses.
        """
        dialect = connection.dialect
        key = (dialect.driver, *rows[0])
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(dialect, list(rows[0]))
        values = [compiled.values(row) for row in rows]
        return connection.exec_driver_sql(compiled.sql, values if len(values) > 1 else values[0]).rowcount

    def _compile(self, dialect: Dialect, given: list[str]) -> _Compiled:
        compiled = self._statement(dialect.name).compile(dialect=dialect, column_keys=given)
        names = tuple(compiled.positiontup if compiled.positional else compiled.params)
        types = {name: compiled.binds[name].type.dialect_impl(dialect) for name in names}
        converters = {name: type_.bind_processor(dialect) for name, type_ in types.items()}
        return _Compiled(
            sql=str(compiled),
            names=names,
            converters=tuple((name, convert) for name, convert in converters.items() if convert),
            constants={name: compiled.params[name] for name in names if name not in given},
            positional=compiled.positional,
        )
