//! Answers a second as a picture: a panel for each title, a group for each number of connections, a bar for each
//! guarded lane, and a line from its lowest round to its highest.

use std::fmt::Write as _;

use crate::http::{Contestant, Measured};
use crate::report::{name, titles, whole};

const PANEL_WIDTH: f64 = 560.0;
const PANEL_HEIGHT: f64 = 300.0;
const PLOT_LEFT: f64 = 64.0;
const PLOT_TOP: f64 = 62.0;
const PLOT_WIDTH: f64 = 476.0;
const PLOT_HEIGHT: f64 = 190.0;
const PANELS_ACROSS: usize = 2;
const LEGEND_WIDTH: f64 = 119.0;
const BAR_WIDTH_MAX: f64 = 44.0;
/// How much of a group's width its bars take at most.
const FILLED: f64 = 0.8;
const GRID_LINES: u32 = 4;

/// Told apart by people who see colours differently, too.
const COLOURS: [&str; 5] = ["#999999", "#0072b2", "#e69f00", "#009e73", "#cc79a7"];

/// The picture as SVG.
pub(crate) fn svg(lanes: &[Measured]) -> String {
    let titles = titles(lanes);
    let rows = titles.len().div_ceil(PANELS_ACROSS);
    let (width, height) = (PANEL_WIDTH * PANELS_ACROSS as f64, PANEL_HEIGHT * rows as f64);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (number, title) in titles.into_iter().enumerate() {
        let (across, down) = (number % PANELS_ACROSS, number / PANELS_ACROSS);
        let (x, y) = (PANEL_WIDTH * across as f64, PANEL_HEIGHT * down as f64);
        // The unguarded application would dwarf those that are compared.
        let shown = |lane: &&Measured| lane.title == title && lane.lane.who != Contestant::Bare;
        let of_title: Vec<&Measured> = lanes.iter().filter(shown).collect();
        let _ = writeln!(svg, "<g transform=\"translate({x} {y})\">");
        panel(&mut svg, title, &of_title);
        svg += "</g>\n";
    }
    svg += "</svg>\n";
    svg
}

fn panel(svg: &mut String, title: &str, lanes: &[&Measured]) {
    let _ = writeln!(
        svg,
        "<text x=\"{PLOT_LEFT}\" y=\"22\" font-size=\"14\" font-weight=\"bold\">{title}: answers/s</text>"
    );
    let highest = lanes.iter().map(|lane| lane.per_second.max).fold(0.0, f64::max);
    let top = round_up(highest);
    let y = |value: f64| PLOT_TOP + PLOT_HEIGHT * (1.0 - value / top);
    for line in 0..=GRID_LINES {
        let value = top * f64::from(line) / f64::from(GRID_LINES);
        let (at, right, label) = (y(value), PLOT_LEFT + PLOT_WIDTH, whole(value));
        let _ = writeln!(
            svg,
            "<line x1=\"{PLOT_LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            PLOT_LEFT - 6.0,
            at + 4.0
        );
    }
    let names = each_once(lanes.iter().map(|lane| name(lane)));
    for (number, name) in names.iter().enumerate() {
        let (x, colour) = (PLOT_LEFT + LEGEND_WIDTH * number as f64, COLOURS[number % COLOURS.len()]);
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"36\" width=\"10\" height=\"10\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"45\">{name}</text>",
            x + 14.0
        );
    }
    let groups = each_once(lanes.iter().map(|lane| lane.connections));
    let group_width = PLOT_WIDTH / groups.len() as f64;
    let bar_width = (group_width * FILLED / names.len() as f64).min(BAR_WIDTH_MAX);
    for (number, connections) in groups.iter().enumerate() {
        let left = PLOT_LEFT + group_width * number as f64;
        let plural = if *connections == 1 { "" } else { "s" };
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{} connection{plural}</text>",
            left + group_width / 2.0,
            PLOT_TOP + PLOT_HEIGHT + 18.0,
            whole(*connections as f64)
        );
        for lane in lanes.iter().filter(|lane| lane.connections == *connections) {
            let Some(place) = names.iter().position(|other| *other == name(lane)) else { continue };
            let x = left + (group_width - bar_width * names.len() as f64) / 2.0 + bar_width * place as f64;
            bar(svg, lane, x, bar_width, y, COLOURS[place % COLOURS.len()]);
        }
    }
}

fn bar(svg: &mut String, lane: &Measured, x: f64, width: f64, y: impl Fn(f64) -> f64, colour: &str) {
    let (top, middle) = (y(lane.per_second.median), x + width / 2.0);
    let (lowest, highest) = (y(lane.per_second.min), y(lane.per_second.max));
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{colour}\">\
         <title>{}: {}/s</title></rect>\
         <line x1=\"{middle:.1}\" x2=\"{middle:.1}\" y1=\"{lowest:.1}\" y2=\"{highest:.1}\" stroke=\"#333333\"/>",
        width - 1.0,
        y(0.0) - top,
        name(lane),
        whole(lane.per_second.median)
    );
}

/// The next number that reads well on an axis with four lines.
fn round_up(value: f64) -> f64 {
    let magnitude = 10_f64.powf(value.max(1.0).log10().floor());
    let steps = [1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0, 10.0];
    steps.into_iter().map(|step| step * magnitude).find(|top| *top >= value).unwrap_or(value)
}

fn each_once<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut once = Vec::new();
    for item in items {
        if !once.contains(&item) {
            once.push(item);
        }
    }
    once
}

#[cfg(test)]
mod tests {
    use super::round_up;

    #[test]
    fn an_axis_ends_at_a_round_number_above() {
        assert_eq!([1.0, 950.0, 1_001.0, 47_000.0].map(round_up), [1.0, 1_000.0, 1_200.0, 60_000.0]);
    }
}
