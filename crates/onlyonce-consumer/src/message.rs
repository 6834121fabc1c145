//! A message as a broker delivers it.

use bytes::Bytes;

/// A message, whatever broker it comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// What the producer calls it, as the broker's own field says: AMQP's `message_id`, `Nats-Msg-Id`. `None` if
    /// that field is not there or empty; nothing is ever made up in its place.
    pub id: Option<String>,
    /// Where it was sent: a routing key, a subject, a topic.
    pub topic: String,
    /// Its headers in the broker's order, repeats kept. A value that is not text is its bytes.
    pub headers: Vec<(String, Bytes)>,
    /// The payload; it is held in memory.
    pub payload: Bytes,
    /// How often the broker says that it has delivered the message, this time included. 1 only if that is certain: the store
    /// is then not asked for earlier attempts before this one. They are counted there, because a broker also counts
    /// deliveries that never reached a handler.
    pub deliveries: Option<u64>,
}

impl Message {
    /// The first header with this name, ASCII case ignored.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&Bytes> {
        self.headers.iter().find(|(header, _)| header.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_header_of_a_name_is_found_in_any_case() {
        let header =
            |name: &str, value: &'static str| (name.to_owned(), Bytes::from_static(value.as_bytes()));
        let message = Message {
            headers: vec![header("a", "0"), header("Order-Id", "1"), header("order-id", "2")],
            ..Message::default()
        };
        assert_eq!(message.header("ORDER-ID").map(|value| &value[..]), Some(&b"1"[..]));
        assert_eq!(message.header("order"), None);
    }
}
