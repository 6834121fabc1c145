//! What can be set, with its defaults and limits.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use onlyonce::settings::DURATION_MAX;
use onlyonce::{InboxConfig, SettingsError};

use crate::message::Message;

/// Everything about a consumer but its broker, its store, its name and its handler.
///
/// Durations are measured on this process's monotonic clock, except those in [`inbox`](Self::inbox), which the store
/// adds to its own clock, and the delays before a message is delivered again, which the broker counts on its own.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How messages are remembered: for how long, and how long one is held whose worker died.
    pub inbox: InboxConfig,
    /// Where a message's id is found.
    pub message_id: MessageId,
    /// Whether the payload must be the same, byte for byte, whenever a message comes again. A message that has the id of
    /// another payload is then dead-lettered; otherwise it is taken for a copy. A change makes copies of messages that
    /// were processed before it look like messages with another payload.
    pub check_payload: bool,
    /// How many messages are processed at a time; on a store where one transaction at a time can write, such as
    /// SQLite, never more than one.
    pub concurrency: u16,
    /// How many messages the broker hands out that are not settled, those being processed among them. At least
    /// `concurrency`.
    pub prefetch: u16,
    /// How many attempts a message has before it is dead-lettered. One that killed its worker counts, for all that was
    /// processed beside it as well; so the last of several is made alone. One that a shutdown interrupted does not count,
    /// nor do those before it.
    pub attempts_max: u32,
    /// How long one attempt may take, from opening its transaction. It is then rolled back, and has failed.
    pub handler_timeout: Duration,
    /// How long a message waits after its first failed attempt, unless the handler says otherwise. Doubled after each
    /// further one.
    pub retry_first: Duration,
    /// The longest that it waits so.
    pub retry_ceiling: Duration,
    /// The longest that a copy waits which meets another worker at the same message; no longer than that one's lease.
    pub in_flight_delay_max: Duration,
    /// How long a message is kept while the store is away, before it is put back for
    /// [`retry_first`](Self::retry_first): put back at once, it would only come again, and the broker counts that.
    pub store_wait: Duration,
    /// How long a shutdown waits for handlers; what still runs then is rolled back and put back.
    pub shutdown_grace: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            inbox: InboxConfig::default(),
            message_id: MessageId::default(),
            check_payload: true,
            concurrency: 8,
            prefetch: 16,
            attempts_max: 10,
            handler_timeout: Duration::from_secs(300),
            retry_first: Duration::from_secs(1),
            retry_ceiling: Duration::from_secs(300),
            in_flight_delay_max: Duration::from_secs(15),
            store_wait: Duration::from_secs(20),
            shutdown_grace: Duration::from_secs(30),
        }
    }
}

impl Settings {
    /// Checks the settings against each other.
    ///
    /// # Errors
    /// Names the setting that contradicts another, and what is allowed.
    pub fn check(&self) -> Result<(), SettingsError> {
        self.inbox.check()?;
        for (name, value, may_be_zero) in [
            ("handler_timeout", self.handler_timeout, false),
            ("retry_first", self.retry_first, false),
            ("retry_ceiling", self.retry_ceiling, false),
            ("in_flight_delay_max", self.in_flight_delay_max, false),
            ("store_wait", self.store_wait, true),
            ("shutdown_grace", self.shutdown_grace, true),
        ] {
            if value > DURATION_MAX {
                return Err(SettingsError::new(name, format!("{value:?} is too long; at most ten years")));
            }
            if value.is_zero() && !may_be_zero {
                return Err(SettingsError::new(name, "must be longer than zero"));
            }
        }
        let refused = |name, reason: String| Err(SettingsError::new(name, reason));
        let Self { concurrency, prefetch, retry_first, retry_ceiling, .. } = self;
        if *concurrency == 0 {
            return refused("concurrency", "must be at least 1".to_owned());
        }
        if prefetch < concurrency {
            return refused(
                "prefetch",
                format!(
                    "{prefetch} must be at least concurrency = {concurrency}, or some of it is never used"
                ),
            );
        }
        if self.attempts_max == 0 {
            return refused("attempts_max", "must be at least 1".to_owned());
        }
        if retry_ceiling < retry_first {
            return refused(
                "retry_ceiling",
                format!("{retry_ceiling:?} must be at least retry_first = {retry_first:?}"),
            );
        }
        Ok(())
    }

    /// How long a message waits after this attempt, the first of which is 1.
    pub(crate) fn retry_delay(&self, attempt: u32) -> Duration {
        let doubled = 2_u32.saturating_pow(attempt.saturating_sub(1));
        self.retry_first.saturating_mul(doubled).min(self.retry_ceiling)
    }
}

/// Where a message's id is found. One without is dead-lettered with that reason, and never given a random one: every
/// copy would be another message.
#[derive(Clone, Default)]
pub enum MessageId {
    /// In the broker's own field: AMQP's `message_id`, `Nats-Msg-Id`.
    #[default]
    Field,
    /// In the header with this name, ASCII case ignored.
    Header(String),
    /// As the function finds it, such as in the payload. One that panics has found none.
    Function(FindId),
}

/// Finds a message's id, if it has one.
pub type FindId = Arc<dyn Fn(&Message) -> Option<String> + Send + Sync>;

impl MessageId {
    /// In the header with this name, ASCII case ignored.
    pub fn header(name: impl Into<String>) -> Self {
        Self::Header(name.into())
    }

    /// As this function finds it, such as in the payload.
    pub fn function(find: impl Fn(&Message) -> Option<String> + Send + Sync + 'static) -> Self {
        Self::Function(Arc::new(find))
    }

    /// The message's id, which is not empty.
    pub(crate) fn of(&self, message: &Message) -> Option<String> {
        let id = match self {
            Self::Field => message.id.clone(),
            // Two values that are not text must not become the same one.
            Self::Header(name) => String::from_utf8(message.header(name)?.to_vec()).ok(),
            // A message that surprises it would come again and again, and never be counted.
            Self::Function(find) => catch_unwind(AssertUnwindSafe(|| find(message))).ok().flatten(),
        };
        id.filter(|id| !id.is_empty())
    }

    /// For whoever has to find out why there is none.
    pub(crate) fn described(&self) -> String {
        match self {
            Self::Field => "the broker's field for it is absent or empty".to_owned(),
            Self::Header(name) => format!("the header {name} is absent, empty or not text"),
            Self::Function(_) => "the function that finds it found none, or panicked".to_owned(),
        }
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field => f.write_str("Field"),
            Self::Header(name) => f.debug_tuple("Header").field(name).finish(),
            Self::Function(_) => f.write_str("Function"),
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn what_is_wrong_is_named() {
        let refused = |set: fn(&mut Settings)| {
            let mut settings = Settings::default();
            set(&mut settings);
            settings.check().map_err(|error| error.setting)
        };
        assert_eq!(refused(|_| {}), Ok(()));
        assert_eq!(refused(|settings| settings.shutdown_grace = Duration::ZERO), Ok(()));
        assert_eq!(refused(|settings| settings.concurrency = 0), Err("concurrency"));
        assert_eq!(refused(|settings| settings.prefetch = 7), Err("prefetch"));
        assert_eq!(refused(|settings| settings.attempts_max = 0), Err("attempts_max"));
        assert_eq!(refused(|settings| settings.handler_timeout = Duration::ZERO), Err("handler_timeout"));
        assert_eq!(refused(|settings| settings.retry_first = Duration::ZERO), Err("retry_first"));
        assert_eq!(refused(|settings| settings.retry_ceiling = SECOND / 2), Err("retry_ceiling"));
        assert_eq!(
            refused(|settings| settings.in_flight_delay_max = Duration::MAX),
            Err("in_flight_delay_max")
        );
        assert_eq!(refused(|settings| settings.inbox.lease = Duration::ZERO), Err("lease"));
        assert_eq!(
            refused(|settings| settings.inbox.redelivery_horizon = Some(DURATION_MAX)),
            Err("retention")
        );
    }

    #[test]
    fn the_wait_doubles_with_each_attempt_up_to_its_ceiling() {
        let settings = Settings::default();
        let waits = [1, 2, 3, 9, 10, 33, u32::MAX].map(|attempt| settings.retry_delay(attempt).as_secs());
        assert_eq!(waits, [1, 2, 4, 256, 300, 300, 300]);
    }

    #[test]
    fn an_id_is_found_where_it_is_said_to_be_and_nowhere_else() {
        let header = |name: &str, value: &'static [u8]| (name.to_owned(), Bytes::from_static(value));
        let message = Message {
            id: Some("field".to_owned()),
            headers: vec![header("Order", b"header"), header("empty", b""), header("bytes", b"\xff")],
            payload: Bytes::from_static(b"payload"),
            ..Message::default()
        };
        let of = |place: MessageId| place.of(&message);
        assert_eq!(of(MessageId::Field).as_deref(), Some("field"));
        assert_eq!(of(MessageId::header("order")).as_deref(), Some("header"));
        for absent in ["empty", "bytes", "other"] {
            assert_eq!(of(MessageId::header(absent)), None, "{absent}");
        }
        let payload = MessageId::function(|message| String::from_utf8(message.payload.to_vec()).ok());
        assert_eq!(of(payload).as_deref(), Some("payload"));
        assert_eq!(of(MessageId::function(|_| Some(String::new()))), None);
        assert_eq!(MessageId::Field.of(&Message { id: Some(String::new()), ..Message::default() }), None);
    }
}
