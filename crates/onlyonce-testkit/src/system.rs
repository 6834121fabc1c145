//! Programs, users, ports, and children that end with this process.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Where packages put Postgres's programs, beside the search path.
const POSTGRES_FOLDER: &str = "/usr/lib/postgresql";

const BESIDE_POSTGRES: [&str; 3] = ["postgresql", "pgbouncer", "openssl"];

const POSTGRES_PROGRAMS: [&str; 3] = ["initdb", "pg_ctl", "psql"];

/// The folder that has Postgres's programs: of the search path, or else of the newest version.
pub(crate) fn postgres_folder() -> PathBuf {
    found_or_installed("pg_ctl", &BESIDE_POSTGRES, || {
        let mut versions: Vec<(u32, PathBuf)> = fs::read_dir(POSTGRES_FOLDER)
            .into_iter()
            .flatten()
            .filter_map(|entry| {
                let path = entry.ok()?.path();
                let version = path.file_name()?.to_str()?.parse().ok()?;
                Some((version, path.join("bin")))
            })
            .filter(|(_, folder)| has_all(folder, &POSTGRES_PROGRAMS))
            .collect();
        versions.sort();
        in_search_path(&POSTGRES_PROGRAMS).or_else(|| versions.pop().map(|(_, folder)| folder))
    })
}

pub(crate) fn pgbouncer() -> PathBuf {
    let folder = found_or_installed("pgbouncer", &BESIDE_POSTGRES, || {
        in_search_path(&["pgbouncer"])
            .or_else(|| Path::new("/usr/sbin/pgbouncer").exists().then(|| PathBuf::from("/usr/sbin")))
    });
    folder.join("pgbouncer")
}

pub(crate) fn openssl() -> PathBuf {
    found_or_installed("openssl", &BESIDE_POSTGRES, || in_search_path(&["openssl"])).join("openssl")
}

/// The program that starts a broker as whoever calls it. The one in the search path insists on a user.
pub(crate) fn rabbitmq_server() -> PathBuf {
    let program = "rabbitmq-server";
    let folder = found_or_installed(program, &[program], || {
        let folder = PathBuf::from("/usr/lib/rabbitmq/bin");
        has_all(&folder, &[program]).then_some(folder).or_else(|| in_search_path(&[program]))
    });
    folder.join(program)
}

pub(crate) fn nats_server() -> PathBuf {
    let program = "nats-server";
    let folder = found_or_installed(program, &[program], || {
        in_search_path(&[program]).or_else(|| {
            let folder = PathBuf::from("/usr/sbin");
            has_all(&folder, &[program]).then_some(folder)
        })
    });
    folder.join(program)
}

pub(crate) fn nginx() -> PathBuf {
    let program = "nginx";
    let folder = found_or_installed(program, &["nginx-light"], || {
        let folder = PathBuf::from("/usr/sbin");
        in_search_path(&[program]).or_else(|| has_all(&folder, &[program]).then_some(folder))
    });
    folder.join(program)
}

fn in_search_path(programs: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).find(|folder| has_all(folder, programs))
}

fn has_all(folder: &Path, programs: &[&str]) -> bool {
    programs.iter().all(|program| folder.join(program).exists())
}

fn found_or_installed(program: &str, packages: &[&str], find: impl Fn() -> Option<PathBuf>) -> PathBuf {
    // One at a time; whoever waited finds what the first installed.
    static INSTALLING: Mutex<()> = Mutex::new(());
    let installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(folder) = find() {
        return folder;
    }
    if is_root() {
        install(packages);
    }
    drop(installing);
    find().unwrap_or_else(|| panic!("{program} is missing: apt-get install {}", packages.join(" ")))
}

fn install(packages: &[&str]) {
    let _quiet = NoServices::begin();
    let install = [&["install", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300"], packages];
    for arguments in [&["update"][..], &install.concat()] {
        let mut command = Command::new("apt-get");
        command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
        run(command);
    }
}

/// While this lives, an installed package does not start its own server: private ones are all that tests
/// need, and where there is no init system a start that fails would fail the installation.
struct NoServices(Option<&'static Path>);

impl NoServices {
    fn begin() -> Self {
        let policy = Path::new("/usr/sbin/policy-rc.d");
        if policy.exists() {
            return Self(None);
        }
        let written = fs::write(policy, "#!/bin/sh\nexit 101\n")
            .and_then(|()| fs::set_permissions(policy, fs::Permissions::from_mode(0o755)));
        written.unwrap_or_else(|error| panic!("{}: {error}", policy.display()));
        Self(Some(policy))
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if let Some(policy) = self.0 {
            let _ = fs::remove_file(policy);
        }
    }
}

pub(crate) fn is_root() -> bool {
    static_text("id", &["-u"]) == "0"
}

fn static_text(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
}

/// A command as a user that servers are willing to run as.
pub(crate) fn unprivileged(program: impl AsRef<Path>) -> Command {
    let program = program.as_ref();
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", user(), "--regid", user(), "--clear-groups", "--"]).arg(program);
    command
}

fn user() -> &'static str {
    // The package's own user; `nobody` where Postgres came without a package.
    if static_text("id", &["-u", "postgres"]).is_empty() { "nobody" } else { "postgres" }
}

/// A folder of the user that servers run as. The server's keeper removes it.
pub(crate) fn folder(prefix: &str) -> PathBuf {
    let folder = tempfile::Builder::new().prefix(prefix).tempdir().expect("a temporary folder").keep();
    if is_root() {
        let mut command = Command::new("chown");
        run({
            command.arg(format!("{}:", user())).arg(&folder);
            command
        });
    }
    folder
}

/// Lets a server read a file that this process wrote.
pub(crate) fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    if is_root() {
        let mut command = Command::new("chown");
        command.arg(format!("{}:", user())).arg(path);
        run(command);
    }
}

pub(crate) fn free_port() -> u16 {
    let [port] = free_ports();
    port
}

/// Different ones: they are held until all are known.
pub(crate) fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind(("127.0.0.1", 0)).expect("a free port"));
    listeners.each_ref().map(|listener| listener.local_addr().expect("an address").port())
}

/// Runs to the end; its output belongs to the panic if it fails.
pub(crate) fn run(mut command: Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A shell that runs `then` when this process is gone, however it went: its standard input ends then.
#[derive(Debug)]
pub(crate) struct Keeper(Child);

impl Keeper {
    pub(crate) fn new(first: &str, then: &str) -> Self {
        let script = format!("trap '' INT TERM HUP; {first}\nread -r _; {then}");
        let mut command = unprivileged("/bin/sh");
        command.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}
