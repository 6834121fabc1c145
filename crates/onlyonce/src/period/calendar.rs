//! Which period an instant belongs to, as pure functions over a time zone: no clock, no I/O.
//!
//! | the clock is set | calendar periods | a cron expression that names hours | one that names every hour |
//! |---|---|---|---|
//! | forward | an hour that is skipped has no period | once, at the first instant after the gap | as real hours go by |
//! | back | a repeated hour is two periods | the first time only | as real hours go by |
//!
//! Days and whatever is longer have one period for each local date, week, month, quarter or year, however long the
//! clock makes them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use jiff::civil::{Date, DateTime};
use jiff::tz::{AmbiguousOffset, Offset, TimeZone};
use jiff::{SignedDuration, Span, Timestamp};

use super::cron::{Cron, DAYS_WITHOUT_MINUTE_MAX, MalformedCron};

/// What the periods of a job are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Every {
    /// Hours of the wall clock: `2026-07-14T02`; in an hour that occurs twice `2026-10-25T02+01:00`.
    Hour,
    /// Local dates: `2026-07-14`.
    Day,
    /// ISO 8601 weeks, from Monday: `2026-W31`.
    Week,
    /// `2026-07`.
    Month,
    /// `2026-Q3`.
    Quarter,
    /// `2026`.
    Year,
    /// The local minutes that an expression names, each until the next: `2026-07-14T02:30`.
    Cron(Cron),
}

const UNITS: [(&str, Every); 6] = [
    ("hour", Every::Hour),
    ("day", Every::Day),
    ("week", Every::Week),
    ("month", Every::Month),
    ("quarter", Every::Quarter),
    ("year", Every::Year),
];

impl FromStr for Every {
    type Err = MalformedCron;

    fn from_str(text: &str) -> Result<Self, MalformedCron> {
        match UNITS.into_iter().find(|(name, _)| *name == text) {
            Some((_, every)) => Ok(every),
            None => text.parse().map(Self::Cron),
        }
    }
}

impl fmt::Display for Every {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cron(cron) => cron.fmt(f),
            unit => f.write_str(unit.kind()),
        }
    }
}

impl Every {
    /// The unit, or `cron`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        UNITS.iter().find(|(_, unit)| unit == self).map_or("cron", |(name, _)| name)
    }
}

/// A job's periods in a time zone.
#[derive(Clone, Debug)]
pub struct Schedule {
    every: Every,
    zone: TimeZone,
}

/// One period: what a job runs once for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Period {
    name: String,
    starts_at: Timestamp,
    ends_at: Timestamp,
    every: Every,
    zone: String,
}

impl Period {
    /// The hour of the wall clock in this zone that `scheduled_at` is in.
    #[must_use]
    pub fn hour(zone: &TimeZone, scheduled_at: Timestamp) -> Self {
        hour(zone, scheduled_at)
    }

    /// The local date that `scheduled_at` is on.
    #[must_use]
    pub fn day(zone: &TimeZone, scheduled_at: Timestamp) -> Self {
        Unit::DAY.period(zone, scheduled_at)
    }

    /// The ISO week that `scheduled_at` is in.
    #[must_use]
    pub fn week(zone: &TimeZone, scheduled_at: Timestamp) -> Self {
        Unit::WEEK.period(zone, scheduled_at)
    }

    /// The month that `scheduled_at` is in. For timers that may fire early see [`Schedule::due`], also for cron expressions.
    #[must_use]
    pub fn month(zone: &TimeZone, scheduled_at: Timestamp) -> Self {
        Unit::MONTH.period(zone, scheduled_at)
    }

    /// The quarter that `scheduled_at` is in.
    #[must_use]
    pub fn quarter(zone: &TimeZone, scheduled_at: Timestamp) -> Self {
        Unit::QUARTER.period(zone, scheduled_at)
    }

    /// The year that `scheduled_at` is in.
    #[must_use]
    pub fn year(zone: &TimeZone, scheduled_at: Timestamp) -> Self {
        Unit::YEAR.period(zone, scheduled_at)
    }

    /// Its name, which is part of the key: see [`Every`].
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its first instant: for a cron expression, when it is due.
    #[must_use]
    pub fn starts_at(&self) -> Timestamp {
        self.starts_at
    }

    /// The first instant that is no longer in it.
    #[must_use]
    pub fn ends_at(&self) -> Timestamp {
        self.ends_at
    }

    /// What it is one of.
    #[must_use]
    pub fn every(&self) -> &Every {
        &self.every
    }

    /// The time zone's name.
    #[must_use]
    pub fn zone(&self) -> &str {
        &self.zone
    }

    /// The longest that a period of this kind can be. What remembers a run for less would let it happen again.
    #[must_use]
    pub fn longest(&self) -> Duration {
        const HOUR: Duration = Duration::from_secs(3_600);
        let days = |days: u32| 24 * days * HOUR + HOUR;
        match self.every {
            Every::Hour => 2 * HOUR,
            Every::Day => days(1),
            Every::Week => days(7),
            Every::Month => days(31),
            Every::Quarter => days(92),
            Every::Year => days(366),
            Every::Cron(ref cron) => {
                let date = Offset::UTC.to_datetime(self.starts_at).date();
                Duration::from_secs(60 * cron.longest_wait_minutes(date)) + HOUR
            }
        }
    }
}

impl Schedule {
    /// The periods of this kind in this zone.
    #[must_use]
    pub fn new(every: Every, zone: TimeZone) -> Self {
        Self { every, zone }
    }

    /// What its periods are.
    #[must_use]
    pub fn every(&self) -> &Every {
        &self.every
    }

    /// Its time zone.
    #[must_use]
    pub fn zone(&self) -> &TimeZone {
        &self.zone
    }

    /// The period that a timer means that fired at this instant: one that begins within `tolerance` if that is
    /// nearer than the start of the current one, and the current one otherwise, however late the timer is.
    ///
    /// `None` at the end of the calendar, and before a cron expression's first day in it.
    #[must_use]
    pub fn due(&self, at: Timestamp, tolerance: Duration) -> Option<Period> {
        let current = self.current(at)?;
        let (past, ahead) = (between(current.starts_at, at), between(at, current.ends_at));
        if current.ends_at > at && ahead <= tolerance && ahead < past {
            self.next(&current)
        } else {
            Some(current)
        }
    }

    /// The period that this instant is in; of a cron expression, the latest one that was due.
    #[must_use]
    pub fn current(&self, at: Timestamp) -> Option<Period> {
        match &self.every {
            Every::Cron(cron) => self.latest_tick(cron, at).map(|tick| self.ticking(cron, tick)),
            Every::Hour => Some(Period::hour(&self.zone, at)),
            Every::Day => Some(Period::day(&self.zone, at)),
            Every::Week => Some(Period::week(&self.zone, at)),
            Every::Month => Some(Period::month(&self.zone, at)),
            Every::Quarter => Some(Period::quarter(&self.zone, at)),
            Every::Year => Some(Period::year(&self.zone, at)),
        }
    }

    /// The period after this one.
    #[must_use]
    pub fn next(&self, period: &Period) -> Option<Period> {
        (period.ends_at < Timestamp::MAX).then(|| self.current(period.ends_at)).flatten()
    }

    /// The period with this name.
    ///
    /// # Errors
    /// When there is none, with the names that come near.
    pub fn find(&self, name: &str) -> Result<Period, UnknownPeriod> {
        let unknown = |near: &[String]| UnknownPeriod::new(name, &self.every, near);
        let (first, last) = named_times(&self.every, name).ok_or_else(|| unknown(&[]))?;
        let mut near = Vec::new();
        for local in [first, last] {
            let instants = match local_time(&self.zone, local) {
                Some(Local::Once(at) | Local::Skipped(at)) => [at, at],
                Some(Local::Twice(earlier, later)) => [earlier, later],
                None => continue,
            };
            for period in instants.into_iter().filter_map(|at| self.current(at)) {
                if period.name == name {
                    return Ok(period);
                }
                if !near.contains(&period.name) {
                    near.push(period.name);
                }
            }
        }
        Err(unknown(&near))
    }

    /// The last tick that is not after this instant.
    fn latest_tick(&self, cron: &Cron, at: Timestamp) -> Option<Tick> {
        let mut date = self.zone.to_datetime(at).date().saturating_add(ONE_DAY);
        let mut latest: Option<Tick> = None;
        // The date that the clock shows may go back by one when it is set, so neighbours are looked at together.
        for day in 0..DAYS_WITHOUT_MINUTE_MAX {
            let before = self.ticks(cron, date).into_iter().rfind(|tick| tick.at <= at);
            latest = latest.max(before);
            if latest.is_some() && day >= 2 {
                break;
            }
            date = date.yesterday().ok()?;
        }
        latest
    }

    /// The first tick that is after this instant.
    fn first_tick(&self, cron: &Cron, after: Timestamp) -> Option<Tick> {
        let mut date = self.zone.to_datetime(after).date().saturating_sub(ONE_DAY);
        let mut first: Option<Tick> = None;
        for day in 0..DAYS_WITHOUT_MINUTE_MAX {
            let next = self.ticks(cron, date).into_iter().find(|tick| tick.at > after);
            first = match (first, next) {
                (Some(first), Some(next)) => Some(first.min(next)),
                (first, next) => first.or(next),
            };
            if first.is_some() && day >= 2 {
                break;
            }
            date = date.tomorrow().ok()?;
        }
        first
    }

    fn ticking(&self, cron: &Cron, tick: Tick) -> Period {
        let ends_at = self.first_tick(cron, tick.at).map_or(Timestamp::MAX, |next| next.at);
        Period {
            name: tick.name(&self.zone),
            starts_at: tick.at,
            ends_at,
            every: Every::Cron(cron.clone()),
            zone: zone_name(&self.zone),
        }
    }

    /// The ticks of a local date, in order. Several that the clock pushed to one instant are one tick.
    fn ticks(&self, cron: &Cron, date: Date) -> Vec<Tick> {
        if !cron.names_day(date) {
            return Vec::new();
        }
        let times = cron.times().map(|(hour, minute)| date.at(hour, minute, 0, 0));
        if let Some(offset) = self.calm(date) {
            let at = |local| offset.to_timestamp(local).ok().map(|at| Tick { at, local, twice: false });
            return times.filter_map(at).collect();
        }
        let mut ticks: Vec<Tick> = times.flat_map(|local| self.tick(cron, local)).flatten().collect();
        ticks.sort();
        // Of one instant, the last is the one that is nearest to what the clock shows.
        ticks.reverse();
        ticks.dedup_by_key(|tick| tick.at);
        ticks.reverse();
        ticks
    }

    /// The offset of a date that is far from any change of the clock. Most are, and there are many minutes in one.
    fn calm(&self, date: Date) -> Option<Offset> {
        let midnight = Offset::UTC.to_timestamp(date.at(0, 0, 0, 0)).ok()?;
        let (from, to) = (midnight.checked_sub(2 * ONE_DAY).ok()?, midnight.checked_add(3 * ONE_DAY).ok()?);
        let change = self.zone.following(from).next().map(|transition| transition.timestamp());
        change.is_none_or(|change| change > to).then(|| self.zone.to_offset(midnight))
    }

    fn tick(&self, cron: &Cron, local: DateTime) -> [Option<Tick>; 2] {
        let (once, real) = (|at| Some(Tick { at, local, twice: false }), cron.names_every_hour());
        match local_time(&self.zone, local) {
            Some(Local::Once(at)) => [once(at), None],
            Some(Local::Skipped(at)) if !real => [once(at), None],
            Some(Local::Twice(at, again)) if real => {
                [at, again].map(|at| Some(Tick { at, local, twice: true }))
            }
            Some(Local::Twice(at, _)) => [once(at), None],
            Some(Local::Skipped(_)) | None => [None, None],
        }
    }
}

const ONE_DAY: SignedDuration = SignedDuration::from_hours(24);

/// A moment that a cron expression names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Tick {
    at: Timestamp,
    /// What the expression names.
    local: DateTime,
    /// Whether it does so twice, because the clock shows that time twice.
    twice: bool,
}

impl Tick {
    fn name(self, zone: &TimeZone) -> String {
        let name = self.local.strftime("%Y-%m-%dT%H:%M").to_string();
        if self.twice { name + &offset_at(zone, self.at) } else { name }
    }
}

/// A unit of whole days.
struct Unit {
    every: Every,
    first_day: fn(Date) -> Date,
    length: fn() -> Span,
    name: fn(Date) -> String,
}

impl Unit {
    const DAY: Self = Self {
        every: Every::Day,
        first_day: |date| date,
        length: || Span::new().days(1),
        name: |first| first.strftime("%Y-%m-%d").to_string(),
    };
    const WEEK: Self = Self {
        every: Every::Week,
        first_day: |date| date.saturating_sub(Span::new().days(date.weekday().to_monday_zero_offset())),
        length: || Span::new().weeks(1),
        name: |first| {
            let week = first.iso_week_date();
            format!("{:04}-W{:02}", week.year(), week.week())
        },
    };
    const MONTH: Self = Self {
        every: Every::Month,
        first_day: Date::first_of_month,
        length: || Span::new().months(1),
        name: |first| first.strftime("%Y-%m").to_string(),
    };
    const QUARTER: Self = Self {
        every: Every::Quarter,
        first_day: |date| date.first_of_month().saturating_sub(Span::new().months((date.month() - 1) % 3)),
        length: || Span::new().months(3),
        name: |first| format!("{:04}-Q{}", first.year(), (first.month() - 1) / 3 + 1),
    };
    const YEAR: Self = Self {
        every: Every::Year,
        first_day: Date::first_of_year,
        length: || Span::new().years(1),
        name: |first| format!("{:04}", first.year()),
    };

    fn period(self, zone: &TimeZone, at: Timestamp) -> Period {
        let first = (self.first_day)(zone.to_datetime(at).date());
        let next = first.checked_add((self.length)()).ok();
        Period {
            name: (self.name)(first),
            starts_at: first_instant(zone, first).unwrap_or(Timestamp::MIN),
            ends_at: next.and_then(|next| first_instant(zone, next)).unwrap_or(Timestamp::MAX),
            every: self.every,
            zone: zone_name(zone),
        }
    }
}

/// The first instant of a local date, which need not be midnight.
fn first_instant(zone: &TimeZone, date: Date) -> Option<Timestamp> {
    local_time(zone, date.at(0, 0, 0, 0)).map(|local| match local {
        Local::Once(at) | Local::Skipped(at) | Local::Twice(at, _) => at,
    })
}

/// The hour of the wall clock that an instant is in.
fn hour(zone: &TimeZone, at: Timestamp) -> Period {
    let starts_at = hour_start(zone, at);
    let local = zone.to_datetime(starts_at);
    let name = local.strftime("%Y-%m-%dT%H").to_string();
    let name = if hour_occurs_twice(zone, local) { name + &offset_at(zone, starts_at) } else { name };
    Period { name, starts_at, ends_at: hour_end(zone, starts_at), every: Every::Hour, zone: zone_name(zone) }
}

/// An hour begins when the clock shows a full hour, or is set into another one.
///
/// Where the clock is set by half an hour, one hour is only half repeated: that is one long hour, not two.
fn hour_start(zone: &TimeZone, mut at: Timestamp) -> Timestamp {
    loop {
        let local = zone.to_datetime(at);
        let full = at.saturating_sub(into_hour(local)).unwrap_or(Timestamp::MIN);
        let Some(set) = clock_set_by(zone, at).filter(|set| *set > full) else { return full };
        let before = set.saturating_sub(INSTANT).unwrap_or(Timestamp::MIN);
        if hour_of(zone.to_datetime(before)) != hour_of(zone.to_datetime(set)) {
            return set;
        }
        at = before;
    }
}

fn hour_end(zone: &TimeZone, starts_at: Timestamp) -> Timestamp {
    let mut at = starts_at;
    loop {
        let left = SignedDuration::from_hours(1) - into_hour(zone.to_datetime(at));
        let full = at.saturating_add(left).unwrap_or(Timestamp::MAX);
        match zone.following(at).next().map(|transition| transition.timestamp()) {
            Some(set) if set <= full && hour_start(zone, set) == set => return set,
            Some(set) if set <= full => at = set,
            _ => return full,
        }
    }
}

/// Whether two hours would have this hour's name.
fn hour_occurs_twice(zone: &TimeZone, local: DateTime) -> bool {
    let date = local.date();
    [date.at(local.hour(), 0, 0, 0), date.at(local.hour(), 59, 59, 999_999_999)].into_iter().any(|local| {
        match local_time(zone, local) {
            Some(Local::Twice(earlier, later)) => hour_start(zone, earlier) != hour_start(zone, later),
            _ => false,
        }
    })
}

const INSTANT: SignedDuration = SignedDuration::from_nanos(1);

fn into_hour(local: DateTime) -> SignedDuration {
    SignedDuration::from_secs(i64::from(local.minute()) * 60 + i64::from(local.second()))
        + SignedDuration::from_nanos(i64::from(local.subsec_nanosecond()))
}

fn hour_of(local: DateTime) -> (Date, i8) {
    (local.date(), local.hour())
}

/// When the clock was last set, up to and including this instant.
fn clock_set_by(zone: &TimeZone, at: Timestamp) -> Option<Timestamp> {
    let beyond = at.saturating_add(INSTANT).ok()?;
    zone.preceding(beyond).next().map(|transition| transition.timestamp())
}

/// When a clock on the wall shows a time.
enum Local {
    Once(Timestamp),
    /// Never: the clock is set forward past it. This is the first instant after that.
    Skipped(Timestamp),
    Twice(Timestamp, Timestamp),
}

/// `None` outside of the calendar.
fn local_time(zone: &TimeZone, local: DateTime) -> Option<Local> {
    let instants = zone.to_ambiguous_timestamp(local);
    let (earlier, later) = (instants.earlier().ok()?, instants.later().ok()?);
    Some(match instants.offset() {
        AmbiguousOffset::Unambiguous { .. } => Local::Once(earlier),
        // Read with the old offset it lies after the gap.
        AmbiguousOffset::Gap { .. } => Local::Skipped(clock_set_by(zone, later)?),
        AmbiguousOffset::Fold { .. } => Local::Twice(earlier, later),
    })
}

/// The first and the last local time that a period with this name may begin at.
fn named_times(every: &Every, name: &str) -> Option<(DateTime, DateTime)> {
    let midnight = |date: Date| Some((date.at(0, 0, 0, 0), date.at(0, 0, 0, 0)));
    let year = |text: &str| text.parse().ok().filter(|_| text.len() == 4);
    let date = |text: &str| -> Option<Date> { text.parse().ok().filter(|_| text.len() == 10) };
    match every {
        Every::Year => midnight(Date::new(year(name)?, 1, 1).ok()?),
        Every::Quarter => {
            let (of, quarter) = name.split_once("-Q")?;
            let quarter: i8 = quarter.parse().ok().filter(|quarter| (1..=4).contains(quarter))?;
            midnight(Date::new(year(of)?, 3 * quarter - 2, 1).ok()?)
        }
        Every::Month => midnight(date(&format!("{name}-01"))?),
        Every::Week => {
            let (of, week) = name.split_once("-W")?;
            let monday = jiff::civil::Weekday::Monday;
            let week = jiff::civil::ISOWeekDate::new(year(of)?, week.parse().ok()?, monday).ok()?;
            midnight(week.date())
        }
        Every::Day => {
            // A date of which midnight was skipped begins later.
            let date = date(name)?;
            Some((date.at(0, 0, 0, 0), date.at(23, 59, 59, 999_999_999)))
        }
        Every::Hour => {
            let (of, hour) = name.split_at_checked(10)?;
            let hour: i8 = hour.strip_prefix('T')?.get(..2)?.parse().ok()?;
            let date = date(of)?;
            (0..24).contains(&hour).then(|| (date.at(hour, 0, 0, 0), date.at(hour, 59, 59, 999_999_999)))
        }
        Every::Cron(_) => {
            let minute: DateTime = name.get(..16)?.parse().ok()?;
            Some((minute, minute))
        }
    }
}

/// A name that is none of a schedule's periods, with what is near or how one is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownPeriod(String);

impl UnknownPeriod {
    fn new(name: &str, every: &Every, near: &[String]) -> Self {
        let example = match every {
            Every::Hour => "2026-07-14T02",
            Every::Day => "2026-07-14",
            Every::Week => "2026-W31",
            Every::Month => "2026-07",
            Every::Quarter => "2026-Q3",
            Every::Year => "2026",
            Every::Cron(_) => "2026-07-14T02:30",
        };
        let hint = match near {
            [] => format!("one is written {example}"),
            near => format!("near it there is {}", near.join(", ")),
        };
        Self(format!("{name:?} is not a period of {:?}; {hint}", every.to_string()))
    }
}

impl fmt::Display for UnknownPeriod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UnknownPeriod {}

/// `+02:00`, and seconds where history has them.
fn offset_at(zone: &TimeZone, at: Timestamp) -> String {
    let seconds = zone.to_offset(at).duration_since(Offset::UTC).as_secs();
    let (sign, seconds) = (if seconds < 0 { '-' } else { '+' }, seconds.abs());
    let text = format!("{sign}{:02}:{:02}", seconds / 3_600, seconds / 60 % 60);
    if seconds % 60 == 0 { text } else { format!("{text}:{:02}", seconds % 60) }
}

/// The name that all names of a zone stand for. Two zones without one are told apart by their offset only, if they have
/// just one.
fn zone_name(zone: &TimeZone) -> String {
    match (zone.primary_iana_name(), zone.to_fixed_offset()) {
        (Some(name), _) => name.to_owned(),
        (None, Ok(_)) => offset_at(zone, Timestamp::UNIX_EPOCH),
        (None, Err(_)) => "unnamed".to_owned(),
    }
}

fn between(from: Timestamp, to: Timestamp) -> Duration {
    to.duration_since(from).try_into().unwrap_or(Duration::ZERO)
}

#[cfg(test)]
mod tests;
