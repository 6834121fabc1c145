//! Stands for a card provider that goes by `Idempotency-Key`, and can be told to behave badly.
//!
//! `POST /charges` charges; `GET /charges` says what was charged; `PUT /mood` takes `fine`, `failing` (charges, and
//! answers 500), `declining`, or a number: charges, and answers after so many milliseconds. Charges are kept in
//! `charges.txt`.

use std::collections::HashMap;
use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{post, put};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let app = Router::new()
        .route("/charges", post(charge).get(list))
        .route("/mood", put(change))
        .with_state(Shared(Arc::new(Mutex::new(Provider::open()?))));
    let address = std::env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3001".into());
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app).await?;
    Ok(())
}

#[derive(Clone)]
struct Shared(Arc<Mutex<Provider>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Provider> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Provider {
    mood: Mood,
    /// By key.
    charges: HashMap<String, Order>,
    file: File,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mood {
    Fine,
    Slow(Duration),
    Failing,
    Declining,
}

#[derive(Clone, PartialEq, Eq, Deserialize)]
struct Order {
    card: String,
    amount: u32,
}

#[derive(Serialize)]
struct Charge {
    id: String,
}

async fn charge(State(shared): State<Shared>, headers: HeaderMap, Json(order): Json<Order>) -> Response {
    let Some(key) = headers.get("idempotency-key").and_then(|key| key.to_str().ok()) else {
        return (StatusCode::BAD_REQUEST, "send an Idempotency-Key\n").into_response();
    };
    let mood = shared.lock().mood;
    if mood == Mood::Declining {
        return (StatusCode::PAYMENT_REQUIRED, "declined\n").into_response();
    }
    let charged = shared.lock().charge_once(key, order);
    if let Mood::Slow(answers_after) = mood {
        tokio::time::sleep(answers_after).await;
    }
    match charged {
        Ok(_) if mood == Mood::Failing => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Ok(charge) => (StatusCode::CREATED, Json(charge)).into_response(),
        Err(refused) => refused.into_response(),
    }
}

async fn list(State(shared): State<Shared>) -> String {
    let charges = &shared.lock().charges;
    format!(
        "{} charges of {} in all\n",
        charges.len(),
        charges.values().map(|order| order.amount).sum::<u32>()
    )
}

async fn change(State(shared): State<Shared>, mood: String) -> Result<String, StatusCode> {
    let changed = match mood.as_str() {
        "fine" => Mood::Fine,
        "failing" => Mood::Failing,
        "declining" => Mood::Declining,
        millis => match millis.parse() {
            Ok(millis) => Mood::Slow(Duration::from_millis(millis)),
            Err(_) => return Err(StatusCode::BAD_REQUEST),
        },
    };
    shared.lock().mood = changed;
    Ok(format!("{mood} from now on\n"))
}

impl Provider {
    /// With the charges of earlier runs: a line is a key, an amount and a card.
    fn open() -> std::io::Result<Self> {
        let lines = match std::fs::read_to_string("charges.txt") {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            read => read?,
        };
        let charges = lines.lines().filter_map(|line| {
            let mut words = line.splitn(3, ' ');
            let (key, amount, card) = (words.next()?, words.next()?.parse().ok()?, words.next()?);
            Some((key.to_owned(), Order { card: card.to_owned(), amount }))
        });
        let charges = charges.collect();
        let file = OpenOptions::new().create(true).append(true).open("charges.txt")?;
        Ok(Self { mood: Mood::Fine, charges, file })
    }

    /// What providers do with a key: one charge, and a refusal of another order under the same key.
    fn charge_once(&mut self, key: &str, order: Order) -> Result<Charge, StatusCode> {
        match self.charges.get(key) {
            Some(earlier) if *earlier != order => {
                return Err(StatusCode::UNPROCESSABLE_ENTITY);
            }
            Some(_) => {}
            None => {
                let Order { card, amount } = &order;
                if writeln!(self.file, "{key} {amount} {card}").and_then(|()| self.file.sync_all()).is_err() {
                    return Err(StatusCode::INSUFFICIENT_STORAGE);
                }
                self.charges.insert(key.to_owned(), order);
            }
        }
        // Providers number their charges; a name that follows from the key can be told in a README.
        Ok(Charge { id: format!("ch_{}", key.split('-').next().unwrap_or(key)) })
    }
}
