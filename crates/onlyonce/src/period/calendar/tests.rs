use std::collections::HashSet;

use super::*;

fn zone(name: &str) -> TimeZone {
    TimeZone::get(name).unwrap_or_else(|error| panic!("{error}"))
}

fn schedule(every: &str, zone_name: &str) -> Schedule {
    Schedule::new(every.parse().unwrap_or_else(|error| panic!("{error}")), zone(zone_name))
}

fn at(instant: &str) -> Timestamp {
    instant.parse().unwrap_or_else(|error| panic!("{instant}: {error}"))
}

fn due(schedule: &Schedule, instant: &str, tolerance: u64) -> String {
    schedule.due(at(instant), Duration::from_secs(tolerance)).expect("within the calendar").name
}

/// The runs that begin from one instant to another, each with what a clock on the wall then shows.
fn runs(every: &str, zone_name: &str, from: &str, to: &str) -> Vec<String> {
    let schedule = schedule(every, zone_name);
    let mut runs = Vec::new();
    let mut period = schedule.current(at(from)).expect("within the calendar");
    while period.starts_at < at(to) {
        if period.starts_at >= at(from) {
            let shown = schedule.zone.to_datetime(period.starts_at).strftime("%d %H:%M").to_string();
            runs.push(format!("{} {shown}{}", period.name, offset_at(&schedule.zone, period.starts_at)));
        }
        period = schedule.next(&period).expect("within the calendar");
    }
    runs
}

/// The two days of the clock change in each zone: what runs, under which name, and what the clock shows then.
#[test]
fn the_days_of_the_clock_change() {
    let table: [(&str, &str, &str, &str, &[&str]); 26] = [
        // Berlin, forward: 02:00 becomes 03:00.
        (
            "Europe/Berlin",
            "hour",
            "2026-03-29T00:00+01",
            "2026-03-29T05:00+02",
            &[
                "2026-03-29T00 29 00:00+01:00",
                "2026-03-29T01 29 01:00+01:00",
                "2026-03-29T03 29 03:00+02:00",
                "2026-03-29T04 29 04:00+02:00",
            ],
        ),
        (
            "Europe/Berlin",
            "day",
            "2026-03-28T00:00+01",
            "2026-03-31T00:00+02",
            &["2026-03-28 28 00:00+01:00", "2026-03-29 29 00:00+01:00", "2026-03-30 30 00:00+02:00"],
        ),
        (
            "Europe/Berlin",
            "30 2 * * *",
            "2026-03-28T00:00+01",
            "2026-03-31T00:00+02",
            &[
                "2026-03-28T02:30 28 02:30+01:00",
                "2026-03-29T02:30 29 03:00+02:00",
                "2026-03-30T02:30 30 02:30+02:00",
            ],
        ),
        // Two that were skipped are made up for once.
        (
            "Europe/Berlin",
            "0,30 2 * * *",
            "2026-03-29T00:00+01",
            "2026-03-30T00:00+02",
            &["2026-03-29T02:30 29 03:00+02:00"],
        ),
        (
            "Europe/Berlin",
            "0 1-4 * * *",
            "2026-03-29T00:00+01",
            "2026-03-30T00:00+02",
            &[
                "2026-03-29T01:00 29 01:00+01:00",
                "2026-03-29T03:00 29 03:00+02:00",
                "2026-03-29T04:00 29 04:00+02:00",
            ],
        ),
        (
            "Europe/Berlin",
            "30 * * * *",
            "2026-03-29T00:00+01",
            "2026-03-29T05:00+02",
            &[
                "2026-03-29T00:30 29 00:30+01:00",
                "2026-03-29T01:30 29 01:30+01:00",
                "2026-03-29T03:30 29 03:30+02:00",
                "2026-03-29T04:30 29 04:30+02:00",
            ],
        ),
        // Berlin, back: 03:00 becomes 02:00.
        (
            "Europe/Berlin",
            "hour",
            "2026-10-25T01:00+02",
            "2026-10-25T04:00+01",
            &[
                "2026-10-25T01 25 01:00+02:00",
                "2026-10-25T02+02:00 25 02:00+02:00",
                "2026-10-25T02+01:00 25 02:00+01:00",
                "2026-10-25T03 25 03:00+01:00",
            ],
        ),
        (
            "Europe/Berlin",
            "day",
            "2026-10-25T00:00+02",
            "2026-10-27T00:00+01",
            &["2026-10-25 25 00:00+02:00", "2026-10-26 26 00:00+01:00"],
        ),
        (
            "Europe/Berlin",
            "30 2 * * *",
            "2026-10-24T00:00+02",
            "2026-10-27T00:00+01",
            &[
                "2026-10-24T02:30 24 02:30+02:00",
                "2026-10-25T02:30 25 02:30+02:00",
                "2026-10-26T02:30 26 02:30+01:00",
            ],
        ),
        (
            "Europe/Berlin",
            "30 * * * *",
            "2026-10-25T01:00+02",
            "2026-10-25T04:00+01",
            &[
                "2026-10-25T01:30 25 01:30+02:00",
                "2026-10-25T02:30+02:00 25 02:30+02:00",
                "2026-10-25T02:30+01:00 25 02:30+01:00",
                "2026-10-25T03:30 25 03:30+01:00",
            ],
        ),
        // São Paulo, forward at midnight: the day begins at 01:00.
        (
            "America/Sao_Paulo",
            "hour",
            "2018-11-03T23:00-03",
            "2018-11-04T03:00-02",
            &["2018-11-03T23 03 23:00-03:00", "2018-11-04T01 04 01:00-02:00", "2018-11-04T02 04 02:00-02:00"],
        ),
        (
            "America/Sao_Paulo",
            "day",
            "2018-11-03T00:00-03",
            "2018-11-06T00:00-02",
            &["2018-11-03 03 00:00-03:00", "2018-11-04 04 01:00-02:00", "2018-11-05 05 00:00-02:00"],
        ),
        (
            "America/Sao_Paulo",
            "0 0 * * *",
            "2018-11-03T00:00-03",
            "2018-11-06T00:00-02",
            &[
                "2018-11-03T00:00 03 00:00-03:00",
                "2018-11-04T00:00 04 01:00-02:00",
                "2018-11-05T00:00 05 00:00-02:00",
            ],
        ),
        // São Paulo, back: the last hour of the 17th occurs twice.
        (
            "America/Sao_Paulo",
            "hour",
            "2018-02-17T22:00-02",
            "2018-02-18T01:00-03",
            &[
                "2018-02-17T22 17 22:00-02:00",
                "2018-02-17T23-02:00 17 23:00-02:00",
                "2018-02-17T23-03:00 17 23:00-03:00",
                "2018-02-18T00 18 00:00-03:00",
            ],
        ),
        (
            "America/Sao_Paulo",
            "day",
            "2018-02-17T00:00-02",
            "2018-02-19T00:00-03",
            &["2018-02-17 17 00:00-02:00", "2018-02-18 18 00:00-03:00"],
        ),
        (
            "America/Sao_Paulo",
            "15 23 * * *",
            "2018-02-17T00:00-02",
            "2018-02-19T00:00-03",
            &["2018-02-17T23:15 17 23:15-02:00", "2018-02-18T23:15 18 23:15-03:00"],
        ),
        // Lord Howe, forward by half an hour: 02:00 becomes 02:30.
        (
            "Australia/Lord_Howe",
            "hour",
            "2026-10-04T01:00+10:30",
            "2026-10-04T04:00+11",
            &["2026-10-04T01 04 01:00+10:30", "2026-10-04T02 04 02:30+11:00", "2026-10-04T03 04 03:00+11:00"],
        ),
        (
            "Australia/Lord_Howe",
            "day",
            "2026-10-04T00:00+10:30",
            "2026-10-06T00:00+11",
            &["2026-10-04 04 00:00+10:30", "2026-10-05 05 00:00+11:00"],
        ),
        (
            "Australia/Lord_Howe",
            "15 2 * * *",
            "2026-10-03T00:00+10:30",
            "2026-10-06T00:00+11",
            &[
                "2026-10-03T02:15 03 02:15+10:30",
                "2026-10-04T02:15 04 02:30+11:00",
                "2026-10-05T02:15 05 02:15+11:00",
            ],
        ),
        // Lord Howe, back: 02:00 becomes 01:30. One hour of ninety minutes, not two.
        (
            "Australia/Lord_Howe",
            "hour",
            "2026-04-05T00:00+11",
            "2026-04-05T04:00+10:30",
            &[
                "2026-04-05T00 05 00:00+11:00",
                "2026-04-05T01 05 01:00+11:00",
                "2026-04-05T02 05 02:00+10:30",
                "2026-04-05T03 05 03:00+10:30",
            ],
        ),
        (
            "Australia/Lord_Howe",
            "*/15 * * * *",
            "2026-04-05T01:15+11",
            "2026-04-05T02:15+10:30",
            &[
                "2026-04-05T01:15 05 01:15+11:00",
                "2026-04-05T01:30+11:00 05 01:30+11:00",
                "2026-04-05T01:45+11:00 05 01:45+11:00",
                "2026-04-05T01:30+10:30 05 01:30+10:30",
                "2026-04-05T01:45+10:30 05 01:45+10:30",
                "2026-04-05T02:00 05 02:00+10:30",
            ],
        ),
        // New York, forward: 02:00 becomes 03:00.
        (
            "America/New_York",
            "hour",
            "2026-03-08T01:00-05",
            "2026-03-08T04:00-04",
            &["2026-03-08T01 08 01:00-05:00", "2026-03-08T03 08 03:00-04:00"],
        ),
        (
            "America/New_York",
            "30 2 * * *",
            "2026-03-07T00:00-05",
            "2026-03-10T00:00-04",
            &[
                "2026-03-07T02:30 07 02:30-05:00",
                "2026-03-08T02:30 08 03:00-04:00",
                "2026-03-09T02:30 09 02:30-04:00",
            ],
        ),
        // New York, back: 02:00 becomes 01:00.
        (
            "America/New_York",
            "hour",
            "2026-11-01T00:00-04",
            "2026-11-01T03:00-05",
            &[
                "2026-11-01T00 01 00:00-04:00",
                "2026-11-01T01-04:00 01 01:00-04:00",
                "2026-11-01T01-05:00 01 01:00-05:00",
                "2026-11-01T02 01 02:00-05:00",
            ],
        ),
        (
            "America/New_York",
            "day",
            "2026-11-01T00:00-04",
            "2026-11-03T00:00-05",
            &["2026-11-01 01 00:00-04:00", "2026-11-02 02 00:00-05:00"],
        ),
        (
            "America/New_York",
            "30 1 * * *",
            "2026-10-31T00:00-04",
            "2026-11-03T00:00-05",
            &[
                "2026-10-31T01:30 31 01:30-04:00",
                "2026-11-01T01:30 01 01:30-04:00",
                "2026-11-02T01:30 02 01:30-05:00",
            ],
        ),
    ];
    for (zone, every, from, to, expected) in table {
        assert_eq!(runs(every, zone, from, to), expected, "{every} in {zone}");
    }
}

/// kubernetes #121594: a daily job of 02:00 ran twice when the clock went back.
#[test]
fn a_timer_that_fires_again_in_the_repeated_hour_means_the_period_that_it_meant_before() {
    for every in ["day", "30 2 * * *"] {
        let job = schedule(every, "Europe/Berlin");
        let (first, again) = ("2026-10-25T02:30+02", "2026-10-25T02:30+01");
        assert_eq!(due(&job, first, 30), due(&job, again, 30), "{every}");
    }
}

/// robfig/cron PR 541, systemd #5595: a job in the skipped hour never ran.
#[test]
fn a_job_in_the_skipped_hour_is_due_right_after_it() {
    let job = schedule("30 2 * * *", "Europe/Berlin");
    assert_eq!(due(&job, "2026-03-29T01:59:00+01", 30), "2026-03-28T02:30");
    assert_eq!(due(&job, "2026-03-29T03:00:00+02", 30), "2026-03-29T02:30");
}

/// celery #1604: on the day of the change the runs of 11:00 and 12:00 both came.
#[test]
fn one_run_for_each_local_date_around_the_year() {
    for name in ["Europe/Berlin", "America/Sao_Paulo", "Australia/Lord_Howe", "America/New_York"] {
        let job = schedule("0 11 * * *", name);
        let mut period = job.current(at("2017-01-01T00:00Z")).expect("within the calendar");
        for _ in 0..(3 * 365) {
            let next = job.next(&period).expect("within the calendar");
            let date = |period: &Period| period.name[..10].parse::<Date>().expect("a date");
            assert_eq!(date(&period).tomorrow().ok(), Some(date(&next)), "{name}");
            period = next;
        }
    }
}

/// good_job PR 1543, node-cron #180: a timer fired seconds early and took the period before.
#[test]
fn a_timer_that_fires_early_means_the_period_that_is_about_to_begin() {
    let table = [
        ("month", "2026-06-30T23:59:55+02", "2026-07"),
        ("month", "2026-07-01T00:00:00+02", "2026-07"),
        ("month", "2026-06-30T23:59:25+02", "2026-06"),
        ("year", "2026-12-31T23:59:55+01", "2027"),
        ("quarter", "2026-06-30T23:59:55+02", "2026-Q3"),
        ("week", "2026-07-26T23:59:55+02", "2026-W31"),
        ("day", "2026-07-13T23:59:55+02", "2026-07-14"),
        ("hour", "2026-07-14T01:59:55+02", "2026-07-14T02"),
        ("0 2 * * *", "2026-07-14T01:59:55+02", "2026-07-14T02:00"),
        ("0 2 * * *", "2026-07-14T01:59:25+02", "2026-07-13T02:00"),
        // The nearer one counts: a minute's job that starts a little late does not take the next minute.
        ("* * * * *", "2026-07-14T02:00:10+02", "2026-07-14T02:00"),
        ("* * * * *", "2026-07-14T02:00:55+02", "2026-07-14T02:01"),
        ("* * * * *", "2026-07-14T02:00:30+02", "2026-07-14T02:00"),
    ];
    for (every, instant, expected) in table {
        assert_eq!(due(&schedule(every, "Europe/Berlin"), instant, 30), expected, "{every} at {instant}");
    }
}

/// kubernetes #42649: after a hundred missed runs a job never started again.
#[test]
fn however_late_there_is_a_period_that_is_due() {
    assert_eq!(due(&schedule("0 2 * * *", "Europe/Berlin"), "2026-07-14T23:00+02", 30), "2026-07-14T02:00");
    assert_eq!(due(&schedule("0 0 29 2 *", "Europe/Berlin"), "2027-12-31T12:00Z", 30), "2024-02-29T00:00");
    assert_eq!(due(&schedule("0 0 29 2 *", "Europe/Berlin"), "2104-02-28T12:00Z", 30), "2096-02-29T00:00");
    assert_eq!(due(&schedule("* * * * *", "Europe/Berlin"), "2036-01-01T00:00Z", 30), "2036-01-01T01:00");
}

/// river #827: day periods were cut in UTC.
#[test]
fn periods_are_cut_where_the_zone_says() {
    let instant = "2026-06-30T22:30Z";
    for (every, berlin, utc) in [
        ("day", "2026-07-01", "2026-06-30"),
        ("month", "2026-07", "2026-06"),
        ("quarter", "2026-Q3", "2026-Q2"),
        ("hour", "2026-07-01T00", "2026-06-30T22"),
    ] {
        assert_eq!(due(&schedule(every, "Europe/Berlin"), instant, 0), berlin);
        assert_eq!(due(&schedule(every, "UTC"), instant, 0), utc);
    }
    // The year of a week is that of its Thursday.
    assert_eq!(due(&schedule("week", "UTC"), "2027-01-03T12:00Z", 0), "2026-W53");
    assert_eq!(due(&schedule("week", "UTC"), "2027-01-04T00:00Z", 0), "2027-W01");
}

/// nats-server #8543: a loop, because midnight did not exist in São Paulo on the day of the change.
#[test]
fn a_day_without_midnight_begins_later() {
    let day = schedule("day", "America/Sao_Paulo").find("2018-11-04").expect("a day");
    assert_eq!((day.starts_at, day.ends_at), (at("2018-11-04T03:00Z"), at("2018-11-05T02:00Z")));
    // Half an hour before midnight the clock was set to half past.
    let day = schedule("day", "America/Toronto").find("1919-03-31").expect("a day");
    assert_eq!(day.starts_at, at("1919-03-31T00:30-04"));
}

/// A day that a whole island skipped.
#[test]
fn a_date_that_never_was_has_no_day_but_is_made_up_for_by_cron() {
    let day = schedule("day", "Pacific/Apia");
    let before = day.find("2011-12-29").expect("a day");
    assert_eq!(day.next(&before).map(|next| next.name), Some("2011-12-31".to_owned()));
    assert!(day.find("2011-12-30").is_err());
    let cron = schedule("0 2 * * *", "Pacific/Apia");
    assert_eq!(cron.find("2011-12-30T02:00").map(|run| run.starts_at), Ok(at("2011-12-31T00:00+14")));
}

/// Around every change of the clock in zones with all sorts of them: periods follow one another without gap or
/// overlap, no two share a name, and each is found by its name.
#[test]
fn periods_tile_the_time_line() {
    const ZONES: [&str; 12] = [
        "Europe/Berlin",
        "America/Sao_Paulo",
        "Australia/Lord_Howe",
        "America/New_York",
        "America/St_Johns",
        "America/Toronto",
        "Africa/Casablanca",
        "Antarctica/Troll",
        "Pacific/Apia",
        "Asia/Pyongyang",
        "Europe/Dublin",
        "Africa/Monrovia",
    ];
    let mut walked = 0;
    for name in ZONES {
        let place = zone(name);
        let changes: Vec<_> =
            place.following(at("1985-01-01T00:00Z")).take(8).map(|change| change.timestamp()).collect();
        for (every, hours) in
            [("hour", 30), ("day", 50), ("*/10 * * * *", 1), ("20 * * * *", 5), ("20 0-4,22-23 * * *", 8)]
        {
            let around = SignedDuration::from_hours(hours);
            let job = schedule(every, name);
            for change in changes.iter().filter(|change| **change < at("2030-01-01T00:00Z")) {
                let mut period = job.current(*change - around).expect("in the calendar");
                let mut names = HashSet::new();
                while period.starts_at < *change + around {
                    let context = || format!("{every} in {name}: {period:?}");
                    assert!(period.starts_at < period.ends_at, "{}", context());
                    assert!(names.insert(period.name.clone()), "twice: {}", context());
                    for instant in [period.starts_at, period.ends_at - INSTANT] {
                        assert_eq!(job.current(instant).as_ref(), Some(&period), "{}", context());
                    }
                    assert_eq!(job.find(&period.name).as_ref(), Ok(&period), "{}", context());
                    let next = job.next(&period).expect("in the calendar");
                    assert_eq!(next.starts_at, period.ends_at, "{}", context());
                    period = next;
                    walked += 1;
                }
            }
        }
    }
    assert!(walked > 4_000, "{walked}");
}

#[test]
fn a_period_is_found_by_its_name_or_refused_with_what_is_near() {
    for (every, name) in [
        ("hour", "2026-07-14T02"),
        ("hour", "2026-10-25T02+02:00"),
        ("day", "2026-07-14"),
        ("week", "2026-W53"),
        ("month", "2026-07"),
        ("quarter", "2026-Q3"),
        ("year", "2026"),
        ("30 2 * * *", "2026-03-29T02:30"),
        ("30 * * * *", "2026-10-25T02:30+01:00"),
    ] {
        assert_eq!(
            schedule(every, "Europe/Berlin").find(name).map(|period| period.name),
            Ok(name.to_owned())
        );
    }
    for (every, name, says) in [
        ("month", "2026-7", "\"2026-7\" is not a period of \"month\"; one is written 2026-07"),
        ("month", "2026-07-14", "one is written 2026-07"),
        ("month", "2026-13", "one is written"),
        ("day", "2026-02-29", "one is written"),
        ("day", "20260714", "one is written"),
        ("week", "2027-W53", "one is written 2026-W31"),
        ("quarter", "2026-Q5", "one is written"),
        ("year", "26", "one is written"),
        ("hour", "2026-07-14T24", "one is written"),
        ("hour", "2026-07-14T02:30", "near it there is 2026-07-14T02"),
        ("hour", "2026-03-29T02", "near it there is 2026-03-29T03"),
        ("hour", "2026-10-25T02", "near it there is 2026-10-25T02+02:00, 2026-10-25T02+01:00"),
        ("hour", "2026-10-25T02+03:00", "near it there is"),
        ("30 2 * * *", "2026-07-14T02:31", "near it there is 2026-07-14T02:30"),
        ("30 2 * * *", "tomorrow", "one is written 2026-07-14T02:30"),
        ("30 * * * *", "2026-10-25T02:30", "near it there is 2026-10-25T02:30+02:00, 2026-10-25T02:30+01:00"),
    ] {
        let error = schedule(every, "Europe/Berlin").find(name).expect_err(name).to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn no_period_is_longer_than_the_longest() {
    for every in ["hour", "day", "week", "month", "quarter", "year", "0 2 * * 1-5", "*/5 9-17 1,15 * *"] {
        for name in ["Europe/Berlin", "Australia/Lord_Howe", "America/Sao_Paulo"] {
            let job = schedule(every, name);
            let mut period = job.current(at("2018-01-01T00:00Z")).expect("in the calendar");
            for _ in 0..250 {
                let length = between(period.starts_at, period.ends_at);
                assert!(length <= period.longest(), "{every} in {name}: {period:?}");
                period = job.next(&period).expect("in the calendar");
            }
        }
    }
}

#[test]
fn the_ends_of_the_calendar_are_no_panic() {
    for every in ["hour", "day", "week", "month", "quarter", "year", "0 2 * * *", "0 0 29 2 *"] {
        for name in ["UTC", "Pacific/Kiritimati", "America/New_York"] {
            let job = schedule(every, name);
            for instant in [Timestamp::MIN, Timestamp::MAX] {
                let period = job.due(instant, Duration::from_secs(60));
                let _ = period.and_then(|period| job.next(&period));
            }
        }
    }
}

#[test]
fn a_zone_is_called_by_one_of_its_names_or_by_its_offset() {
    let instant = at("2026-07-14T12:00Z");
    for (place, name) in [
        (TimeZone::UTC, "UTC"),
        (zone("Etc/UTC"), "UTC"),
        (zone("europe/berlin"), "Europe/Berlin"),
        (zone("Asia/Calcutta"), "Asia/Kolkata"),
        (TimeZone::fixed(jiff::tz::offset(-3)), "-03:00"),
    ] {
        assert_eq!(Period::month(&place, instant).zone(), name);
    }
}
