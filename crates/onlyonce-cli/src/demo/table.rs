//! What was sent, what the callers saw and what the ledger holds, side by side.

/// One scenario, played twice.
pub(super) struct Row {
    pub(super) title: &'static str,
    pub(super) due: usize,
    pub(super) straight: Side,
    pub(super) guarded: Side,
}

/// What came of it on one side.
pub(super) struct Side {
    pub(super) saw: Vec<String>,
    pub(super) charged: usize,
}

const HEAD: [&str; 6] = ["what was sent", "due", "straight: saw", "charged", "onlyonce: saw", "charged"];
const WIDTHS: [usize; 6] = [30, 3, 17, 7, 27, 7];
const CHARGED: [usize; 2] = [3, 5];

/// The table, and the sum in one line below it.
pub(super) fn render(rows: &[Row], in_colour: bool) -> String {
    let mut text = rule('┌', '┬', '┐');
    text += &line(&HEAD.map(str::to_owned), &[None; 6]);
    for row in rows {
        text += &rule('├', '┼', '┤');
        text += &cells(row, in_colour);
    }
    text += &rule('└', '┴', '┘');
    let sum = |of: fn(&Row) -> usize| rows.iter().map(of).sum::<usize>();
    text += &format!(
        "\n{} payments were due. Straight to the API {} were charged, through onlyonce {}.\n",
        sum(|row| row.due),
        sum(|row| row.straight.charged),
        sum(|row| row.guarded.charged),
    );
    text
}

fn cells(row: &Row, in_colour: bool) -> String {
    let columns = [
        wrap(row.title, WIDTHS[0]),
        vec![row.due.to_string()],
        saw(&row.straight, WIDTHS[2]),
        vec![charged(&row.straight, row.due)],
        saw(&row.guarded, WIDTHS[4]),
        vec![charged(&row.guarded, row.due)],
    ];
    let mut colours = [None; 6];
    if in_colour {
        for (column, side) in CHARGED.into_iter().zip([&row.straight, &row.guarded]) {
            colours[column] = Some(if side.charged == row.due { "\x1b[32m" } else { "\x1b[1;31m" });
        }
    }
    let height = columns.iter().map(Vec::len).max().unwrap_or_default();
    (0..height)
        .map(|at| {
            line(&columns.each_ref().map(|column| column.get(at).cloned().unwrap_or_default()), &colours)
        })
        .collect()
}

fn charged(side: &Side, due: usize) -> String {
    let mark = if side.charged == due { '✓' } else { '✗' };
    format!("{} {mark}", side.charged)
}

fn saw(side: &Side, width: usize) -> Vec<String> {
    side.saw.iter().flat_map(|saw| wrap(saw, width)).collect()
}

/// Breaks at spaces; the words of the demo are all shorter than a column.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

fn line(cells: &[String; 6], colours: &[Option<&str>; 6]) -> String {
    let mut text = String::from("│");
    for ((cell, width), colour) in cells.iter().zip(WIDTHS).zip(colours) {
        let (on, off) = colour.map_or(("", ""), |colour| (colour, "\x1b[0m"));
        text += &format!(" {on}{cell:<width$}{off} │");
    }
    text + "\n"
}

fn rule(left: char, cross: char, right: char) -> String {
    let columns: Vec<String> = WIDTHS.iter().map(|width| "─".repeat(width + 2)).collect();
    format!("{left}{}{right}\n", columns.join(&cross.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_as_wide_as_the_frame_and_a_wrong_count_is_marked() {
        let side =
            |charged| Side { saw: vec!["502 upstream-lost".into(), "49 × 201 replayed".into()], charged };
        let rows = [Row {
            title: "A rather long title that has to be broken",
            due: 1,
            straight: side(67),
            guarded: side(1),
        }];
        let text = render(&rows, false);
        let (table, sum) = text.split_once("\n\n").expect("a table and a sum");
        let width = table.lines().next().expect("a frame").chars().count();
        assert!(width <= 112, "{width} columns");
        for line in table.lines() {
            assert_eq!(line.chars().count(), width, "{line}");
        }
        assert!(table.contains("67 ✗") && table.contains("1 ✓"), "{table}");
        assert!(sum.contains("Straight to the API 67 were charged, through onlyonce 1."), "{sum}");
        assert!(render(&rows, true).contains("\x1b[1;31m67 ✗"));
    }
}
