//! What the callers of the demo do, and how many payments that should come to.

use std::pin::Pin;
use std::time::Duration;

use super::LEASE;
use super::api::Api;
use super::client::{Client, Order, tally};

/// One way in which requests are sent more than once.
pub(super) struct Scenario {
    pub(super) title: &'static str,
    /// How many charges it should come to.
    pub(super) due: usize,
    /// Says what the callers saw.
    pub(super) play: fn(Client, Api) -> Playing,
}

type Playing = Pin<Box<dyn Future<Output = Vec<String>> + Send>>;

const ORDER: Order = Order { payer: "ann", order: "order-4711", amount: 100 };
const COPIES: usize = 50;
/// After the API charges, before it answers.
const PATIENCE: Duration = Duration::from_millis(150);

pub(super) const SCENARIOS: [Scenario; 5] = [
    Scenario {
        title: "One payment, 50 copies at once; a third hang up midway and send it again",
        due: 1,
        play: |client, _| Box::pin(burst(client)),
    },
    Scenario {
        title: "A retry with the same key and another amount",
        due: 1,
        play: |client, _| {
            Box::pin(async move {
                vec![client.pay(ORDER).await, client.pay(Order { amount: 999, ..ORDER }).await]
            })
        },
    },
    Scenario {
        title: "Two callers who happen to choose the same key",
        due: 2,
        play: |client, _| {
            Box::pin(async move {
                vec![client.pay(ORDER).await, client.pay(Order { payer: "bob", ..ORDER }).await]
            })
        },
    },
    Scenario {
        title: "The API fails once, and the caller tries again",
        due: 1,
        play: |client, api| {
            Box::pin(async move {
                api.fail_once(ORDER.order);
                vec![client.pay(ORDER).await, client.pay(ORDER).await]
            })
        },
    },
    Scenario {
        title: "The API charges and dies before it answers; the caller tries again, and once more later",
        due: 1,
        play: |client, api| {
            Box::pin(async move {
                api.die_after_charging(ORDER.order);
                let first = client.pay(ORDER).await;
                tokio::time::sleep(LEASE).await;
                vec![first, client.pay(ORDER).await, client.pay(ORDER).await]
            })
        },
    },
];

async fn burst(client: Client) -> Vec<String> {
    let callers: Vec<_> = (0..COPIES)
        .map(|caller| {
            let client = client.clone();
            tokio::spawn(async move {
                if caller % 3 > 0 {
                    return vec![client.pay(ORDER).await];
                }
                vec![client.pay_impatiently(ORDER, PATIENCE).await, client.pay(ORDER).await]
            })
        })
        .collect();
    let mut saw = Vec::new();
    for caller in callers {
        saw.extend(caller.await.unwrap_or_default());
    }
    tally(saw)
}
