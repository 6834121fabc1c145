//! Cron expressions: which minutes of which days they name.
//!
//! ```text
//! ┌─ minute        0-59
//! │ ┌─ hour        0-23
//! │ │ ┌─ day       1-31
//! │ │ │ ┌─ month   1-12 or JAN-DEC
//! │ │ │ │ ┌─ weekday  0-7 or SUN-SAT; 0 and 7 are Sunday
//! * * * * *
//! ```
//!
//! A field is `*`, a number, a range `1-5`, either with a step `*/15`, `10-50/20`, or a list of those. If both
//! day and weekday are restricted, a day that matches either of them counts. `@hourly`, `@daily`, `@midnight`,
//! `@weekly`, `@monthly`, `@yearly` and `@annually` stand for what they say.
//!
//! This says nothing about clocks; see [`Schedule`](super::Schedule) for what happens when one is changed.

use std::fmt;
use std::str::FromStr;

use jiff::Span;
use jiff::civil::Date;

/// For a leap day around a century that leaves one out.
pub(super) const DAYS_WITHOUT_MINUTE_MAX: usize = 8 * 366 + 3;

/// A cron expression of five fields.
#[derive(Clone, Debug)]
pub struct Cron {
    text: String,
    minutes: Field,
    hours: Field,
    days: Field,
    months: Field,
    weekdays: Field,
}

/// One field: a bit for each value that it names.
#[derive(Clone, Copy, Debug)]
struct Field {
    bits: u64,
    /// Opens with `*`: as in every cron, such a field leaves the choice of the day to the other one.
    star: bool,
}

impl Field {
    fn has(self, value: i8) -> bool {
        u32::try_from(value).is_ok_and(|value| self.bits & (1 << value) != 0)
    }

    fn values(self) -> impl DoubleEndedIterator<Item = i8> {
        (0..60).filter(move |value| self.has(*value))
    }
}

impl Cron {
    /// Whether it names any minute of this day.
    pub(super) fn names_day(&self, date: Date) -> bool {
        let day = self.days.has(date.day());
        let weekday = self.weekdays.has(date.weekday().to_sunday_zero_offset());
        let either = !self.days.star && !self.weekdays.star;
        self.months.has(date.month()) && if either { day || weekday } else { day && weekday }
    }

    /// The hours and minutes that it names on each of its days, in order.
    pub(super) fn times(&self) -> impl Iterator<Item = (i8, i8)> {
        self.hours.values().flat_map(|hour| self.minutes.values().map(move |minute| (hour, minute)))
    }

    /// Whether it names every hour: it then means real hours, not those of the wall clock.
    pub(super) fn names_every_hour(&self) -> bool {
        self.hours.bits == (1 << 24) - 1
    }

    /// The longest wait from one of its minutes to the next in the years after this day.
    pub(super) fn longest_wait_minutes(&self, from: Date) -> u64 {
        let times: Vec<u64> = self
            .times()
            .map(|(hour, minute)| 60 * hour.unsigned_abs() as u64 + minute.unsigned_abs() as u64)
            .collect();
        let (first, last) = (times.first().copied().unwrap_or(0), times.last().copied().unwrap_or(0));
        let within_a_day = times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        let (mut longest, mut since) = (1, None::<u64>);
        let days =
            from.series(Span::new().days(1)).take(DAYS_WITHOUT_MINUTE_MAX).filter(|day| self.names_day(*day));
        for day in days {
            let day = day.duration_since(from).as_secs().unsigned_abs() / 86_400;
            longest = longest.max(since.map_or(day, |since| day - since));
            since = Some(day);
        }
        within_a_day.max(longest * 1_440 - last + first)
    }

    /// Whether there is a day that it names at all; `0 0 31 2 *` is as well-formed as it is useless.
    fn names_any_day(&self) -> bool {
        const LONGEST: [i8; 12] = [31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let weekday_is_enough = !self.weekdays.star && !self.days.star;
        weekday_is_enough
            || (1..).zip(LONGEST).any(|(month, days)| {
                self.months.has(month) && self.days.values().any(|day| (1..=days).contains(&day))
            })
    }
}

/// The expression as it was written, apart from white space.
impl fmt::Display for Cron {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl PartialEq for Cron {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Cron {}

/// A text that is not a cron expression: where, and what is allowed there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MalformedCron(String);

impl fmt::Display for MalformedCron {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MalformedCron {}

/// What a field may hold.
struct Allowed {
    name: &'static str,
    from: u8,
    to: u8,
    /// Names of the values from `from` on.
    names: &'static [&'static str],
}

const FIELDS: [Allowed; 5] = [
    Allowed { name: "minute", from: 0, to: 59, names: &[] },
    Allowed { name: "hour", from: 0, to: 23, names: &[] },
    Allowed { name: "day", from: 1, to: 31, names: &[] },
    Allowed {
        name: "month",
        from: 1,
        to: 12,
        names: &["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
    },
    Allowed { name: "weekday", from: 0, to: 7, names: &["sun", "mon", "tue", "wed", "thu", "fri", "sat"] },
];

const NICKNAMES: [(&str, &str); 7] = [
    ("@hourly", "0 * * * *"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@weekly", "0 0 * * 0"),
    ("@monthly", "0 0 1 * *"),
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
];

impl FromStr for Cron {
    type Err = MalformedCron;

    fn from_str(text: &str) -> Result<Self, MalformedCron> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let refused = |why: String| MalformedCron(format!("{text:?} is not a cron expression: {why}"));
        let expanded: Vec<&str> = match words.as_slice() {
            [nickname] if nickname.starts_with('@') => NICKNAMES
                .iter()
                .find(|(name, _)| name.eq_ignore_ascii_case(nickname))
                .map(|(_, fields)| fields.split(' ').collect())
                .ok_or_else(|| {
                    refused(format!(
                        "{nickname} is unknown; {} are allowed",
                        NICKNAMES.map(|n| n.0).join(", ")
                    ))
                })?,
            words => words.to_vec(),
        };
        let fields: [&str; 5] = expanded.as_slice().try_into().map_err(|_| {
            refused(format!(
                "it has {} fields; minute, hour, day, month and weekday are wanted",
                expanded.len()
            ))
        })?;
        let mut read = FIELDS.iter().zip(fields).map(|(allowed, field)| allowed.read(field).map_err(refused));
        let mut next = || read.next().unwrap_or(Ok(Field { bits: 0, star: false }));
        let (minutes, hours, days, months, mut weekdays) = (next()?, next()?, next()?, next()?, next()?);
        if weekdays.has(7) {
            weekdays.bits |= 1;
        }
        let cron = Self { text: words.join(" "), minutes, hours, days, months, weekdays };
        if !cron.names_any_day() {
            return Err(refused("no year has such a day".into()));
        }
        Ok(cron)
    }
}

impl Allowed {
    fn read(&self, field: &str) -> Result<Field, String> {
        let mut bits = 0;
        for part in field.split(',') {
            bits |= self.part(part).ok_or_else(|| self.refusal(field, part))?;
        }
        Ok(Field { bits, star: field.starts_with('*') })
    }

    fn part(&self, part: &str) -> Option<u64> {
        let (range, step) = match part.split_once('/') {
            Some((range, step)) => (range, Some(number(step).filter(|step| *step > 0)?)),
            None => (part, None),
        };
        let (from, to) = match range.split_once('-') {
            _ if range == "*" => (self.from, self.to),
            Some((from, to)) => (self.value(from)?, self.value(to)?),
            // Some read `5/10` as `5-59/10`, others as `5`: better not at all.
            None if step.is_some() => return None,
            None => self.value(range).map(|value| (value, value))?,
        };
        // Both ends of the week are Sunday.
        let to = if range != "*" && self.names.len() == 7 && to == 0 && from > 0 { 7 } else { to };
        let step = usize::from(step.unwrap_or(1));
        (from <= to).then(|| (from..=to).step_by(step).fold(0, |bits, value| bits | 1 << value))
    }

    fn value(&self, text: &str) -> Option<u8> {
        let named = self.names.iter().position(|name| name.eq_ignore_ascii_case(text));
        let value = match named {
            Some(at) => self.from.checked_add(u8::try_from(at).ok()?)?,
            None => number(text)?,
        };
        (self.from..=self.to).contains(&value).then_some(value)
    }

    fn refusal(&self, field: &str, part: &str) -> String {
        let Self { name, from, to, names } = self;
        let names = match (names.first(), names.last()) {
            (Some(first), Some(last)) => format!(" or {}-{}", first.to_uppercase(), last.to_uppercase()),
            _ => String::new(),
        };
        let in_field = if part == field { String::new() } else { format!(" of {field:?}") };
        format!(
            "the {name} {part:?}{in_field} must be *, a number from {from} to {to}{names}, a range such as {from}-{to}, \
             or one with a step such as */2"
        )
    }
}

fn number(text: &str) -> Option<u8> {
    let digits = !text.is_empty() && text.len() <= 3 && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

#[cfg(test)]
mod tests {
    use jiff::civil::date;

    use super::*;

    fn cron(text: &str) -> Cron {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    fn times(text: &str) -> Vec<(i8, i8)> {
        cron(text).times().collect()
    }

    fn days_of_july_2026(text: &str) -> Vec<i8> {
        let cron = cron(text);
        (1..=31).filter(|day| cron.names_day(date(2026, 7, *day))).collect()
    }

    #[test]
    fn lists_ranges_and_steps_name_their_times() {
        assert_eq!(times("30 2 * * *"), [(2, 30)]);
        assert_eq!(times("0,15 9-11/2 * * *"), [(9, 0), (9, 15), (11, 0), (11, 15)]);
        assert_eq!(times("*/20 23 * * *"), [(23, 0), (23, 20), (23, 40)]);
        assert_eq!(times("10-50/20 0 * * *"), [(0, 10), (0, 30), (0, 50)]);
        assert_eq!(times("@daily"), [(0, 0)]);
        assert_eq!(times("@hourly").len(), 24);
        assert_eq!(times("* * * * *").len(), 1_440);
        assert_eq!(times("  5\t6 *  * * "), [(6, 5)]);
    }

    /// July 2026 begins on a Wednesday.
    #[test]
    fn days_and_weekdays_are_alternatives_where_both_are_given() {
        assert_eq!(days_of_july_2026("0 0 13 * *"), [13]);
        assert_eq!(days_of_july_2026("0 0 * * 1"), [6, 13, 20, 27]);
        assert_eq!(days_of_july_2026("0 0 1,31 * MON"), [1, 6, 13, 20, 27, 31]);
        // A field that opens with a star leaves the choice to the other one.
        assert_eq!(days_of_july_2026("0 0 */10 * mon"), [0_i8; 0]);
        assert_eq!(days_of_july_2026("0 0 13 * */1"), [13]);
        assert_eq!(days_of_july_2026("0 0 * 6 *"), [0_i8; 0]);
        assert_eq!(
            days_of_july_2026("0 0 * JUN-aug FRI-SUN"),
            [3, 4, 5, 10, 11, 12, 17, 18, 19, 24, 25, 26, 31]
        );
    }

    #[test]
    fn sunday_is_the_first_and_the_last_day() {
        for weekday in ["0", "7", "sun", "SUN", "7-7", "sun-sun"] {
            assert_eq!(days_of_july_2026(&format!("0 0 * * {weekday}")), [5, 12, 19, 26], "{weekday}");
        }
        assert_eq!(days_of_july_2026("0 0 * * 6-7"), days_of_july_2026("0 0 * * sat,sun"));
        assert_eq!(days_of_july_2026("0 0 * * 0-6").len(), 31);
        assert_eq!(days_of_july_2026("0 0 * * 5-0"), days_of_july_2026("0 0 * * FRI-SUN"));
    }

    #[test]
    fn the_longest_wait_spans_nights_weekends_and_leap_years() {
        for (text, minutes) in [
            ("* * * * *", 1),
            ("*/15 * * * *", 15),
            ("0 9,17 * * *", 16 * 60),
            ("0 2 * * *", 1_440),
            ("0 2 * * 1-5", 3 * 1_440),
            ("0 0 1 * *", 31 * 1_440),
            ("0 0 29 2 *", 1_461 * 1_440),
        ] {
            assert_eq!(cron(text).longest_wait_minutes(date(2026, 7, 14)), minutes, "{text}");
        }
    }

    #[test]
    fn a_wrong_expression_is_refused_with_the_place_and_what_is_allowed() {
        for (text, says) in [
            ("", "0 fields; minute, hour, day, month and weekday"),
            ("0 2 * *", "4 fields"),
            ("0 0 2 * * *", "6 fields"),
            ("60 * * * *", "the minute \"60\" must be *, a number from 0 to 59"),
            ("0 1,24 * * *", "the hour \"24\" of \"1,24\" must be *, a number from 0 to 23"),
            ("0 0 0 * *", "the day \"0\""),
            ("0 0 * foo *", "the month \"foo\" must be *, a number from 1 to 12 or JAN-DEC"),
            ("0 0 * * 8", "the weekday \"8\" must be *, a number from 0 to 7 or SUN-SAT"),
            ("*/0 * * * *", "the minute \"*/0\""),
            ("5/10 * * * *", "the minute \"5/10\""),
            ("30-10 * * * *", "the minute \"30-10\""),
            ("0 0 ? * *", "the day \"?\""),
            ("0 0 L * *", "the day \"L\""),
            ("+1 * * * *", "the minute \"+1\""),
            ("1, * * * *", "the minute \"\" of \"1,\""),
            ("0 0 31 2 *", "no year has such a day"),
            ("0 0 31 4,6,9,11 *", "no year has such a day"),
            ("@reboot", "@reboot is unknown; @hourly, @daily"),
        ] {
            let error = text.parse::<Cron>().expect_err(text).to_string();
            assert!(error.contains(says) && error.contains("is not a cron expression"), "{error}");
        }
        cron("0 0 29 2 *");
        cron("0 0 31 2 MON");
    }
}
