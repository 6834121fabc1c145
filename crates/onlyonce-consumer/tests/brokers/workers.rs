//! Consumers as processes of their own, which end as real ones do.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// `examples/consumer.rs`, several times on one queue.
pub(crate) struct Workers {
    environment: Vec<(&'static str, String)>,
    running: Vec<Child>,
    pub(crate) died: usize,
}

impl Workers {
    pub(crate) fn start(count: usize, environment: Vec<(&'static str, String)>) -> Self {
        let mut workers = Self { environment, running: Vec::new(), died: 0 };
        workers.running = (0..count).map(|_| workers.spawn()).collect();
        workers
    }

    fn spawn(&self) -> Child {
        let test = std::env::current_exe().expect("this test's own path");
        let program: PathBuf =
            test.parent().and_then(|deps| deps.parent()).unwrap().join("examples/consumer");
        let mut command = Command::new(&program);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap_or_else(|error| panic!("{}: {error}; cargo test builds it", program.display()))
    }

    /// `kill -9` for one of them, and another in its place.
    pub(crate) fn kill(&mut self, which: usize) {
        let which = which % self.running.len();
        let _ = self.running[which].kill();
        self.revive();
    }

    /// Another in the place of each that has ended.
    pub(crate) fn revive(&mut self) {
        for which in 0..self.running.len() {
            if self.running[which].try_wait().unwrap().is_some() {
                self.died += 1;
                self.running[which] = self.spawn();
            }
        }
    }

    /// Ends them in order, so that nothing is in anybody's hands.
    pub(crate) fn stop(mut self) {
        for child in &self.running {
            let mut kill = Command::new("kill");
            assert!(kill.arg(child.id().to_string()).status().unwrap().success());
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.running.is_empty() {
            assert!(Instant::now() < deadline, "a consumer does not stop");
            self.running.retain_mut(|child| child.try_wait().unwrap().is_none());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for child in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
