//! What the figures were measured on, and how busy it was besides.

use std::fmt;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use onlyonce_testkit::Postgres;

/// What one commit writes at least.
const PAGE_BYTES: usize = 8192;

const SYNCS_FOR: Duration = Duration::from_secs(1);

/// The machine and the programs on it.
pub(crate) struct Machine {
    lines: Vec<String>,
}

impl Machine {
    /// Looks at it. The folder is on the disk that the databases are on.
    pub(crate) fn look(postgres: &Postgres, folder: &Path) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let model = field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown processor".into());
        let memory = field("/proc/meminfo", "MemTotal").unwrap_or_default();
        let kernel = read("/proc/sys/kernel/osrelease");
        let version = postgres.sql("postgres", "SHOW server_version");
        let settings = ["fsync", "synchronous_commit", "full_page_writes", "shared_buffers"]
            .map(|name| format!("{name} {}", postgres.sql("postgres", &format!("SHOW {name}"))))
            .join(", ");
        let nginx = Command::new("nginx").arg("-v").output();
        let nginx = nginx.map(|output| String::from_utf8_lossy(&output.stderr).trim().to_owned());
        let sync = sync_time(folder).map_or_else(|error| error.to_string(), |time| format!("{time:.0?}"));
        let lines = vec![
            format!("{cores} cores ({model}), {memory} of memory, Linux {kernel}"),
            format!("Postgres {version} ({settings}); {}", nginx.unwrap_or_else(|error| error.to_string())),
            format!("one write of 8 KiB and its fdatasync, alone: {sync} (median)"),
            format!("load of the machine before the run: {}", read("/proc/loadavg")),
        ];
        Self { lines }
    }

    /// Adds what is known at the end.
    pub(crate) fn add(&mut self, line: String) {
        self.lines.push(line);
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.lines.iter().map(|line| format!("- {line}")).collect();
        f.write_str(&lines.join("\n"))
    }
}

/// What a commit cannot be faster than.
fn sync_time(folder: &Path) -> std::io::Result<Duration> {
    let mut file = File::create(folder.join("sync"))?;
    let (started, mut times) = (Instant::now(), Vec::new());
    while started.elapsed() < SYNCS_FOR {
        let asked = Instant::now();
        file.write_all(&[7; PAGE_BYTES])?;
        file.sync_data()?;
        times.push(asked.elapsed());
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The load averages now.
pub(crate) fn load_average() -> String {
    read("/proc/loadavg")
}
