//! A delivery: verified, then claimed by the provider's event id, and answered so that the provider sends it again
//! exactly if that is of use.

use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use onlyonce::{IDEMPOTENT_REPLAYED, Key, Once, RunError};
use serde::{Deserialize, Serialize};
use sqlx::SqlitePool;

use crate::receipt::{self, Rejected};
use crate::signature::Secrets;

#[derive(Clone)]
pub(crate) struct Receiver {
    pub(crate) secrets: Secrets,
    pub(crate) once: Once,
    pub(crate) shop: SqlitePool,
}

/// Only what the work goes by: of the rest, providers change some from delivery to delivery.
#[derive(Clone, Deserialize, Serialize)]
pub(crate) struct Event {
    /// Within the signed bytes. An id from an unsigned header could be anybody's.
    pub(crate) id: String,
    pub(crate) r#type: String,
    pub(crate) invoice: String,
    pub(crate) amount: i64,
}

pub(crate) async fn receive(
    State(Receiver { secrets, once, shop }): State<Receiver>,
    Path(provider): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    // Before anything else: a stranger can neither use up an id nor learn what was done under it.
    if !secrets.verify(&provider, &headers, &body) {
        return (StatusCode::UNAUTHORIZED, "the signature does not verify\n").into_response();
    }
    let Ok(event) = serde_json::from_slice::<Event>(&body) else {
        return (StatusCode::BAD_REQUEST, "this is no event\n").into_response();
    };
    let Ok(key) = Key::new(&event.id) else {
        return (StatusCode::BAD_REQUEST, "the event has no usable id\n").into_response();
    };
    if event.r#type != "invoice.paid" {
        return (StatusCode::OK, "not of interest\n").into_response();
    }
    // Two providers may number their events alike.
    let once = once.for_caller(provider);
    let work = {
        let event = event.clone();
        move |execution| async move { receipt::send(&shop, &event, &execution).await }
    };
    match once.run(key, &event, work).await {
        Ok(returned) if returned.replayed => {
            ([(IDEMPOTENT_REPLAYED, "true")], Json(returned.value)).into_response()
        }
        Ok(returned) => Json(returned.value).into_response(),
        Err(error) => refused(&event.id, &error),
    }
}

fn refused(event: &str, error: &RunError) -> Response {
    match error {
        // The other delivery is doing it. Not 200: if it fails, this one must come again.
        RunError::InFlight { running_for, .. } => {
            again(StatusCode::CONFLICT, *running_for, "this event is being worked on\n")
        }
        // An outcome: no further delivery will change it, so the provider need not try.
        RunError::Kept(kept) => match kept.read::<Rejected>() {
            Ok(rejected) => Json(rejected).into_response(),
            Err(error) => failed(event, &*error),
        },
        RunError::Mismatch => {
            (StatusCode::UNPROCESSABLE_ENTITY, "this id was another event's\n").into_response()
        }
        // Whether it was done is not known: the key is held until its lease ends, and then it is done again.
        RunError::Failed { error: cause, lease_left } => {
            eprintln!("{event}: {error}: {cause}");
            again(StatusCode::SERVICE_UNAVAILABLE, *lease_left, "not known to be done; send it again\n")
        }
        // Nothing was done.
        RunError::Released(_) | RunError::StoreUnavailable(_) => {
            again(StatusCode::SERVICE_UNAVAILABLE, Duration::ZERO, "not done; send it again\n")
        }
        // Another delivery has its outcome, or will have.
        RunError::LeaseLost | RunError::Interrupted => {
            again(StatusCode::SERVICE_UNAVAILABLE, LATER, "not known to be done; send it again\n")
        }
        RunError::Input(_) | RunError::OutcomeUnknown | RunError::NotReplayable(_) => failed(event, error),
    }
}

const LATER: Duration = Duration::from_secs(5);

/// What asks the provider to deliver once more.
fn again(status: StatusCode, after: Duration, said: &'static str) -> Response {
    let seconds = after.as_secs_f64().ceil().max(1.0);
    (status, [(RETRY_AFTER, seconds.to_string())], said).into_response()
}

/// For a person to look at.
fn failed(event: &str, error: &(dyn std::error::Error + Send + Sync)) -> Response {
    eprintln!("{event}: {error}");
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}

/// What a provider is told of an event that was done.
#[derive(Deserialize, Serialize)]
pub(crate) struct Done {
    pub(crate) invoice: String,
    pub(crate) receipt: String,
}
