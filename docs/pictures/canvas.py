"""SVG as plain text: shapes, and charts with axes. Its bytes depend on nothing but what is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

INK, FAINT, GRID = "#24292f", "#8c959f", "#d8dee4"
ACTIVE, CACHED, FREE, NULL, SHARED = "#54aeff", "#ffd33d", "#f6f8fa", "#d0d7de", "#aceebb"
PREFILL, DECODE, AGAIN, WAITS, HOST = "#1f6feb", "#9ecbff", "#f85149", "#eaeef2", "#8250df"
FIRST, SECOND = "#1f6feb", "#fb8f44"
Point = tuple[float, float]


def number(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def path_of(points: Sequence[Point]) -> str:
    return " ".join(f"{number(x)},{number(y)}" for x, y in points)


class Canvas:
    """A picture of so many pixels; y grows downwards."""

    def __init__(self, width: int, height: int) -> None:
        self.elements = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
            f' height="{height}" font-family="sans-serif" font-size="11">'
        ]
        self.box(0, 0, width, height, "#ffffff", stroke="none")

    def svg(self) -> str:
        return "\n".join([*self.elements, "</svg>", ""])

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = INK, dash: str = ""
    ) -> None:
        size = f'width="{number(width)}" height="{number(height)}"'
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.elements.append(
            f'<rect x="{number(x)}" y="{number(y)}" {size} fill="{fill}" stroke="{stroke}"{dashed}/>'
        )

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", color: str = INK, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"'
        self.elements.append(f'<text {place} fill="{color}"{weight}>{escape(text)}</text>')

    def line(self, points: Sequence[Point], color: str = INK, width: float = 1, dash: str = "") -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.elements.append(
            f'<polyline points="{path_of(points)}" fill="none" stroke="{color}"'
            f' stroke-width="{number(width)}"{dashed}/>'
        )

    def area(self, points: Sequence[Point], fill: str) -> None:
        self.elements.append(f'<polygon points="{path_of(points)}" fill="{fill}"/>')

    def arrow(self, start: Point, end: Point, color: str = INK) -> None:
        """A line with a head, which points to the right or to the left, or down."""
        (x, y), along = end, 1 if end[0] >= start[0] else -1
        self.line([start, end], color)
        head = [(x - 4, y - 6), (x + 4, y - 6)] if start[0] == end[0] else [
            (x - 6 * along, y - 4),
            (x - 6 * along, y + 4),
        ]  # fmt: skip
        self.area([end, *head], color)

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Colours and what they mean, side by side."""
        for color, meaning in entries:
            self.box(x, y - 9, 12, 10, color)
            self.text(x + 17, y, meaning)
            x += 33 + 6 * len(meaning)


class Chart:
    """A frame with axes from 0 on, in which data are drawn."""

    def __init__(
        self,
        canvas: Canvas,
        corner: Point,
        size: Point,
        limits: Point,
        *,
        title: str,
        x_label: str,
        y_label: str,
    ) -> None:
        self.canvas = canvas
        self.left, self.top = corner
        self.width, self.height = size
        self.x_limit, self.y_limit = limits
        self._axes()
        canvas.text(self.left, self.top - 10, title, bold=True)
        canvas.text(self.left + self.width, self.top + self.height + 30, x_label, anchor="end")
        canvas.text(self.left + 6, self.top + 12, y_label, color=FAINT)

    def at(self, x: float, y: float) -> Point:
        """Where a value stands."""
        bottom = self.top + self.height
        return self.left + self.width * x / self.x_limit, bottom - self.height * y / self.y_limit

    def line(self, values: Sequence[Point], color: str, width: float = 2, dash: str = "") -> None:
        self.canvas.line([self.at(*value) for value in values], color, width, dash)

    def bands(self, layers: Sequence[tuple[str, Sequence[float]]]) -> None:
        """Layers on top of each other; the value at i holds from i to i + 1."""
        floor = [0.0] * len(layers[0][1])
        for color, values in layers:
            top = [low + value for low, value in zip(floor, values, strict=True)]
            forth, back = staircase(top), reversed(staircase(floor))
            self.canvas.area([self.at(*value) for value in (*forth, *back)], color)
            floor = top

    def mark(self, x: float, color: str) -> None:
        """A line from top to bottom."""
        self.line([(x, 0), (x, self.y_limit)], color, 1, "3 2")

    def label(self, x: float, y: float, text: str, color: str, anchor: str = "start") -> None:
        across, down = self.at(x, y)
        self.canvas.text(across, down, text, anchor=anchor, color=color)

    def _axes(self) -> None:
        for value in ticks(self.y_limit):
            x, y = self.at(0, value)
            self.canvas.line([(x, y), (x + self.width, y)], GRID)
            self.canvas.text(x - 5, y + 4, f"{value:,}", anchor="end", color=FAINT)
        for value in ticks(self.x_limit):
            x, y = self.at(value, 0)
            self.canvas.line([(x, y), (x, y + 4)], FAINT)
            self.canvas.text(x, y + 16, f"{value:,}", anchor="middle", color=FAINT)


def staircase(values: Sequence[float]) -> list[Point]:
    return [point for x, value in enumerate(values) for point in ((x, value), (x + 1, value))]


def ticks(limit: float) -> range:
    """Four to ten round numbers from 0 to a limit."""
    step = next(step for power in range(9) for unit in (1, 2, 5) if limit / (step := unit * 10**power) < 10)
    return range(0, int(limit) + 1, step)
