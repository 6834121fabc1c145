//! The adapters against real brokers: what the seam promises, one test a clause, and what is each broker's own.

#![allow(clippy::unwrap_used)]

mod nats;
mod queue;
mod rabbitmq;
mod storm;
#[macro_use]
mod suite;
mod workers;

suite!(on_rabbitmq, crate::rabbitmq::RabbitQueue);
suite!(on_nats, crate::nats::NatsQueue);

macro_rules! storms {
    ($module:ident, $queue:ty: $($storm:ident)+) => {
        mod $module {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $storm() {
                    crate::storm::$storm::<$queue>().await;
                }
            )+
        }
    };
}

storms!(storm_on_rabbitmq, crate::rabbitmq::RabbitQueue:
    nothing_is_lost_doubled_or_stuck
    a_poison_message_is_dead_lettered_and_the_rest_flow_on
    a_restarted_broker_delivers_what_was_not_settled
);
storms!(storm_on_nats, crate::nats::NatsQueue:
    nothing_is_lost_doubled_or_stuck
    a_poison_message_is_dead_lettered_and_the_rest_flow_on
    a_restarted_broker_delivers_what_was_not_settled
);
