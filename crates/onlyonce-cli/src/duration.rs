//! Durations as people write them: a whole number and a unit, `500ms`, `60s`, `5m`, `24h`, `7d`.

use std::fmt;
use std::time::Duration;

/// Reads a duration.
///
/// # Errors
/// Refuses whatever is not one whole number with one of the units `ms`, `s`, `m`, `h`, `d`. A number
/// without a unit is refused too: it would be seconds to some and milliseconds to others.
pub fn parse(text: &str) -> Result<Duration, MalformedDuration> {
    let malformed = || MalformedDuration(text.to_owned());
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(malformed)?;
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| malformed())?;
    let millis = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(malformed()),
    };
    number.checked_mul(millis).map(Duration::from_millis).ok_or_else(malformed)
}

/// A text that is not a duration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MalformedDuration(String);

impl fmt::Display for MalformedDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not a duration; write a whole number and a unit, such as \"500ms\", \"60s\", \"5m\", \"24h\" \
             or \"7d\"",
            self.0
        )
    }
}

impl std::error::Error for MalformedDuration {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_read() {
        for (text, millis) in [
            ("0s", 0),
            ("500ms", 500),
            ("60s", 60_000),
            ("5m", 300_000),
            ("24h", 86_400_000),
            ("7d", 604_800_000),
            ("007s", 7_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "s",
            "60",
            "1.5s",
            "-1s",
            "+1s",
            " 1s",
            "1s ",
            "1 s",
            "1S",
            "1sec",
            "1h30m",
            "1w",
            "1us",
            "½s",
            "99999999999999999999s",
            "18446744073709551615d",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(parse("60").unwrap_err().to_string().contains("\"60s\""));
    }
}
