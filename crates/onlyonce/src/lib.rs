//! Makes retries safe: the work happens once, and whoever asks again gets the first answer.

pub mod caller;
pub mod keep;
pub mod rules;
pub mod settings;
