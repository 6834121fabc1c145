//! A server that this process started: killed, started again on the same files and port, and never left behind.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::system::{self, Keeper};

/// A loaded machine takes its time over an Erlang start.
const START_TIME_MAX: Duration = Duration::from_secs(120);

const STOP_TIME_MAX: Duration = Duration::from_secs(60);

/// A program in the foreground that serves one port of 127.0.0.1.
#[derive(Debug)]
pub(crate) struct Program {
    program: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(&'static str, String)>,
    folder: PathBuf,
    port: u16,
    /// What a client says first, and so whether it must speak at all before the server greets it.
    hello: &'static [u8],
    running: Mutex<Option<Child>>,
    _keeper: Keeper,
}

impl Program {
    /// Starts it in its folder, beside what the shell command `beside` starts and leaves as its background
    /// job.
    pub(crate) fn start(
        program: PathBuf,
        arguments: Vec<String>,
        environment: Vec<(&'static str, String)>,
        folder: &Path,
        port: u16,
        hello: &'static [u8],
        beside: &str,
    ) -> Self {
        let shown = folder.display();
        let stop = format!("kill -9 $(cat '{shown}/pid') $!; rm -rf '{shown}'");
        let started = Self {
            program,
            arguments,
            environment,
            folder: folder.to_owned(),
            port,
            hello,
            running: Mutex::new(None),
            _keeper: Keeper::new(beside, &stop),
        };
        started.start_again();
        started
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn pid(&self) -> u32 {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.as_ref().expect("it is running").id()
    }

    pub(crate) fn start_again(&self) {
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join("output"));
        let log = log.expect("a file for its output");
        let mut command = system::unprivileged("/bin/sh");
        // The shell becomes the program, so that the number is the program's.
        command.args(["-c", "echo $$ > pid; exec \"$@\"", "sh"]).arg(&self.program).args(&self.arguments);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.current_dir(&self.folder).stdin(Stdio::null());
        command.stdout(log.try_clone().expect("a second handle")).stderr(log);
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(child);
        self.wait_for_greeting();
    }

    /// Runs another program as the same user and in the same environment, to its end.
    pub(crate) fn control(&self, program: &Path, arguments: &[&str]) {
        let mut command = system::unprivileged(program);
        command.args(arguments).current_dir(&self.folder);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        system::run(command);
    }

    /// As `kill -9` does.
    pub(crate) fn crash(&self) {
        let mut child = self.take();
        child.kill().expect("it can be killed");
        child.wait().expect("it has ended");
    }

    /// In order, as SIGTERM asks for.
    pub(crate) fn stop(&self) {
        let mut child = self.take();
        let mut kill = Command::new("kill");
        kill.arg(child.id().to_string());
        system::run(kill);
        let deadline = Instant::now() + STOP_TIME_MAX;
        while child.try_wait().expect("a child of this process").is_none() {
            assert!(Instant::now() < deadline, "it does not stop\n{}", self.output());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn take(&self) -> Child {
        let child = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Its number may be another's soon.
        let _ = std::fs::remove_file(self.folder.join("pid"));
        child.expect("it is running")
    }

    fn wait_for_greeting(&self) {
        let deadline = Instant::now() + START_TIME_MAX;
        while self.greeting().is_err() {
            let ended = match self.running.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
                Some(child) => child.try_wait().expect("a child of this process"),
                None => None,
            };
            assert!(ended.is_none(), "{}: {ended:?}\n{}", self.program.display(), self.output());
            assert!(
                Instant::now() < deadline,
                "{} does not answer\n{}",
                self.program.display(),
                self.output()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn greeting(&self) -> std::io::Result<()> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(self.hello)?;
        stream.read_exact(&mut [0])
    }

    fn output(&self) -> String {
        std::fs::read_to_string(self.folder.join("output")).unwrap_or_default()
    }
}
