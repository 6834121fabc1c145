//! What every adapter promises.

use std::time::{Duration, Instant};

use onlyonce_consumer::broker::{ATTEMPTS, CONSUMER, DETAIL, REASON};
use onlyonce_consumer::{Broker, BrokerErrorKind, Delivery, Subscription};
use onlyonce_testkit::Proxy;
use tokio::time::timeout;

use crate::queue::{DeliveryOf, LONG, Queue, Sent, ends, message, next, nothing, reason};

/// One test for each clause, on this queue.
macro_rules! suite {
    ($module:ident, $queue:ty) => {
        mod $module {
            suite!(@tests $queue:
                a_message_is_delivered_as_it_was_sent
                a_message_without_an_id_has_none
                what_is_acknowledged_is_not_delivered_again
                what_is_put_back_is_delivered_again_after_the_delay
                what_is_put_back_at_once_is_delivered_again
                a_dead_letter_is_kept_elsewhere_and_not_delivered_again
                no_more_than_the_prefetch_is_unsettled
                a_wait_that_is_dropped_takes_no_message
                a_cut_connection_ends_the_subscription_and_loses_nothing
                a_dropped_subscription_gives_back_what_it_had
                a_dropped_delivery_is_delivered_again
                a_broker_that_is_away_is_no_refusal
            );
        }
    };
    (@tests $queue:ty: $($clause:ident)+) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $clause() {
                $crate::suite::$clause::<$queue>().await;
            }
        )+
    };
}

pub(crate) async fn a_message_is_delivered_as_it_was_sent<Q: Queue>() {
    let queue = Q::fresh().await;
    let headers = vec![("Kind", "order"), ("Tenant", "a b")];
    queue.publish(&Sent { headers, ..message("order-1", "{\"total\": 5}") }).await;
    let mut subscription = queue.subscribe(10).await;
    let delivery = next(&mut subscription).await;
    let delivered = delivery.message();
    assert_eq!(delivered.id.as_deref(), Some("order-1"));
    assert_eq!(&delivered.payload[..], b"{\"total\": 5}");
    assert_eq!(delivered.header("kind").map(|value| &value[..]), Some(&b"order"[..]));
    assert_eq!(delivered.header("Tenant").map(|value| &value[..]), Some(&b"a b"[..]));
    assert_eq!(delivered.deliveries, Some(1));
    assert!(!delivered.topic.is_empty());
    delivery.acknowledge().await.unwrap();
}

pub(crate) async fn a_message_without_an_id_has_none<Q: Queue>() {
    let queue = Q::fresh().await;
    queue.publish(&Sent { payload: "who am I", ..Sent::default() }).await;
    queue.publish(&Sent { id: Some(String::new()), payload: "empty", ..Sent::default() }).await;
    let mut subscription = queue.subscribe(10).await;
    for payload in ["who am I", "empty"] {
        let delivery = next(&mut subscription).await;
        assert_eq!((&delivery.message().id, &delivery.message().payload[..]), (&None, payload.as_bytes()));
        delivery.acknowledge().await.unwrap();
    }
}

pub(crate) async fn what_is_acknowledged_is_not_delivered_again<Q: Queue>() {
    let queue = Q::fresh().await;
    queue.publish(&message("one", "1")).await;
    queue.publish(&message("two", "2")).await;
    let mut first = queue.subscribe(10).await;
    next(&mut first).await.acknowledge().await.unwrap();
    next(&mut first).await.acknowledge().await.unwrap();
    nothing(&mut first).await;
    drop(first);
    nothing(&mut queue.subscribe(10).await).await;
}

pub(crate) async fn what_is_put_back_is_delivered_again_after_the_delay<Q: Queue>() {
    let queue = Q::fresh().await;
    queue.publish(&message("one", "1")).await;
    let mut subscription = queue.subscribe(10).await;
    let delay = Duration::from_secs(2);
    let put_back = Instant::now();
    next(&mut subscription).await.put_back(delay).await.unwrap();
    assert!(put_back.elapsed() < delay, "putting back does not wait for the delay");
    // Another message is not held up.
    queue.publish(&message("two", "2")).await;
    let other = next(&mut subscription).await;
    assert_eq!(other.message().id.as_deref(), Some("two"));
    other.acknowledge().await.unwrap();
    let again = next(&mut subscription).await;
    assert_eq!(again.message().id.as_deref(), Some("one"));
    assert!(put_back.elapsed() >= delay, "{:?}", put_back.elapsed());
    assert_ne!(again.message().deliveries, Some(1));
    again.acknowledge().await.unwrap();
    nothing(&mut subscription).await;
}

pub(crate) async fn what_is_put_back_at_once_is_delivered_again<Q: Queue>() {
    let queue = Q::fresh().await;
    queue.publish(&message("one", "1")).await;
    let mut subscription = queue.subscribe(1).await;
    for _ in 0..5 {
        next(&mut subscription).await.put_back(Duration::ZERO).await.unwrap();
    }
    next(&mut subscription).await.acknowledge().await.unwrap();
    nothing(&mut subscription).await;
}

pub(crate) async fn a_dead_letter_is_kept_elsewhere_and_not_delivered_again<Q: Queue>() {
    let queue = Q::fresh().await;
    queue.publish(&Sent { headers: vec![("Kind", "order")], ..message("poison", "boom") }).await;
    let mut subscription = queue.subscribe(10).await;
    next(&mut subscription).await.dead_letter(&reason()).await.unwrap();
    let dead = timeout(LONG, queue.dead_letter()).await.expect("it is there");
    assert_eq!(dead.id.as_deref(), Some("poison"));
    assert_eq!(&dead.payload[..], b"boom");
    let expected = [
        ("Kind", "order"),
        (REASON, "attempts-exhausted"),
        (DETAIL, "no account of that name"),
        (CONSUMER, "billing"),
        (ATTEMPTS, "5"),
    ];
    for (name, value) in expected {
        assert_eq!(dead.header(name), Some(value), "{name} {dead:?}");
    }
    nothing(&mut subscription).await;
    drop(subscription);
    nothing(&mut queue.subscribe(10).await).await;
}

pub(crate) async fn no_more_than_the_prefetch_is_unsettled<Q: Queue>() {
    let queue = Q::fresh().await;
    for number in 0..8 {
        queue.publish(&message(&format!("m{number}"), "x")).await;
    }
    let mut subscription = queue.subscribe(3).await;
    let mut unsettled = Vec::new();
    for _ in 0..3 {
        unsettled.push(next(&mut subscription).await);
    }
    nothing(&mut subscription).await;
    unsettled.remove(1).acknowledge().await.unwrap();
    unsettled.push(next(&mut subscription).await);
    nothing(&mut subscription).await;
    for _ in 0..4 {
        unsettled.remove(0).acknowledge().await.unwrap();
        unsettled.push(next(&mut subscription).await);
    }
    for delivery in unsettled {
        delivery.acknowledge().await.unwrap();
    }
    nothing(&mut subscription).await;
}

pub(crate) async fn a_wait_that_is_dropped_takes_no_message<Q: Queue>() {
    let queue = Q::fresh().await;
    let mut subscription = queue.subscribe(4).await;
    let publishing = async {
        for number in 0..40 {
            queue.publish(&message(&format!("m{number}"), "x")).await;
        }
    };
    let mut seen = Vec::new();
    let receiving = async {
        let started = Instant::now();
        while seen.len() < 40 {
            assert!(started.elapsed() < LONG, "only {} of 40 came: {seen:?}", seen.len());
            // Mostly too short for a message to come.
            let Ok(delivery) = timeout(Duration::from_micros(300), subscription.next()).await else {
                continue;
            };
            let delivery = delivery.expect("the connection lives").unwrap();
            assert_eq!(delivery.message().deliveries, Some(1), "it was delivered before, into the void");
            seen.push(delivery.message().id.clone().unwrap());
            delivery.acknowledge().await.unwrap();
        }
    };
    tokio::join!(publishing, receiving);
}

pub(crate) async fn a_cut_connection_ends_the_subscription_and_loses_nothing<Q: Queue>() {
    let queue = Q::fresh().await;
    let proxy = Proxy::start(queue.port()).await.unwrap();
    let broker = queue.broker_at(proxy.port());
    for id in ["one", "two", "three"] {
        queue.publish(&message(id, "x")).await;
    }
    let mut subscription = broker.subscribe(10).await.unwrap();
    next(&mut subscription).await.acknowledge().await.unwrap();
    let held = next(&mut subscription).await;
    proxy.cut();
    ends(&mut subscription).await;
    // Whether this is heard or not, nothing of the new subscription is settled by it.
    let _ = timeout(LONG, held.put_back(Duration::ZERO)).await.expect("an answer");
    let mut subscription = timeout(LONG, broker.subscribe(10)).await.unwrap().unwrap();
    let mut again = Vec::new();
    for _ in 0..2 {
        let delivery = next(&mut subscription).await;
        again.push(delivery.message().id.clone().unwrap());
        delivery.acknowledge().await.unwrap();
    }
    again.sort();
    assert_eq!(again, ["three", "two"]);
    nothing(&mut subscription).await;
}

pub(crate) async fn a_dropped_subscription_gives_back_what_it_had<Q: Queue>() {
    let queue = Q::fresh().await;
    queue.publish(&message("one", "1")).await;
    queue.publish(&message("two", "2")).await;
    let mut first = queue.subscribe(10).await;
    let held: DeliveryOf<Q> = next(&mut first).await;
    next(&mut first).await.put_back(Duration::from_secs(600)).await.unwrap();
    drop((held, first));
    let mut second = queue.subscribe(10).await;
    let mut again = vec![next(&mut second).await.message().id.clone().unwrap()];
    if Q::HOLDS_WHAT_IS_PUT_BACK {
        again.push(next(&mut second).await.message().id.clone().unwrap());
        again.sort();
        assert_eq!(again, ["one", "two"]);
    } else {
        assert_eq!(again, ["one"]);
    }
}

/// On the same subscription: whoever handled it has panicked, and nobody else will notice.
pub(crate) async fn a_dropped_delivery_is_delivered_again<Q: Queue>() {
    let queue = Q::fresh().await;
    queue.publish(&message("one", "1")).await;
    let mut subscription = queue.subscribe(1).await;
    drop(next(&mut subscription).await);
    let again = next(&mut subscription).await;
    assert_eq!(again.message().id.as_deref(), Some("one"));
    again.acknowledge().await.unwrap();
    nothing(&mut subscription).await;
}

pub(crate) async fn a_broker_that_is_away_is_no_refusal<Q: Queue>() {
    let queue = Q::fresh().await;
    let proxy = Proxy::start(queue.port()).await.unwrap();
    proxy.refuse(true);
    let error = timeout(LONG, queue.broker_at(proxy.port()).subscribe(1)).await.unwrap().err().unwrap();
    assert_eq!(error.kind(), BrokerErrorKind::Unavailable, "{error}");
}
