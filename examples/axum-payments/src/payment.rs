//! A payment: checked, charged and booked, in the request's transaction.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use onlyonce::{Execution, Failure, Tx};
use onlyonce_postgres::PostgresTransactions;
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool};

use crate::card::{CardError, Cards};

#[derive(Deserialize)]
pub(crate) struct Order {
    to: String,
    amount: u32,
}

#[derive(Serialize)]
pub(crate) struct Payment {
    payment: i64,
    /// The provider's id of the charge.
    charge: String,
    /// What the payer may still spend.
    balance: i64,
}

/// Everything that can be refused is, before anything is written: a refusal is an outcome, and what was
/// written before it would be committed with it.
pub(crate) async fn pay(
    State(cards): State<Cards>,
    execution: Execution,
    mut tx: Tx<PostgresTransactions>,
    Json(order): Json<Order>,
) -> Result<(StatusCode, Json<Payment>), PayError> {
    let payer = execution.operation.caller();
    check(&mut tx, payer, &order).await?;
    // The same key on every attempt, so that the provider charges once even if this process dies before the
    // commit.
    let key = execution.downstream("charge").uuid();
    let charge = cards.charge(&key, payer, order.amount).await?;
    let payment = book(&mut tx, payer, &order, charge).await?;
    Ok((StatusCode::CREATED, Json(payment)))
}

/// Locks the payer's account until the end of the transaction: nobody else can spend the money meanwhile.
async fn check(db: &mut PgConnection, payer: &str, order: &Order) -> Result<(), PayError> {
    let amount = i64::from(order.amount);
    if amount == 0 || order.to == payer {
        return Err(PayError::NoPayment);
    }
    let balance: Option<i64> = sqlx::query_scalar("SELECT balance FROM accounts WHERE name = $1 FOR UPDATE")
        .bind(payer)
        .fetch_optional(&mut *db)
        .await?;
    let payee: Option<String> = sqlx::query_scalar("SELECT name FROM accounts WHERE name = $1")
        .bind(&order.to)
        .fetch_optional(&mut *db)
        .await?;
    match (balance, payee) {
        (Some(balance), Some(_)) if balance >= amount => Ok(()),
        (Some(balance), Some(_)) => Err(PayError::Insufficient { balance }),
        _ => Err(PayError::NoAccount),
    }
}

async fn book(
    db: &mut PgConnection,
    payer: &str,
    order: &Order,
    charge: String,
) -> Result<Payment, sqlx::Error> {
    let amount = i64::from(order.amount);
    let payment: i64 = sqlx::query_scalar(
        "INSERT INTO payments (payer, payee, amount, charge) VALUES ($1, $2, $3, $4) RETURNING id",
    )
    .bind(payer)
    .bind(&order.to)
    .bind(amount)
    .bind(&charge)
    .fetch_one(&mut *db)
    .await?;
    enter(db, payment, &order.to, amount).await?;
    let balance = enter(db, payment, payer, -amount).await?;
    Ok(Payment { payment, charge, balance })
}

/// One side of a payment; the account's new balance.
async fn enter(db: &mut PgConnection, payment: i64, account: &str, amount: i64) -> Result<i64, sqlx::Error> {
    sqlx::query("INSERT INTO ledger (payment, account, amount) VALUES ($1, $2, $3)")
        .bind(payment)
        .bind(account)
        .bind(amount)
        .execute(&mut *db)
        .await?;
    sqlx::query_scalar("UPDATE accounts SET balance = balance + $2 WHERE name = $1 RETURNING balance")
        .bind(account)
        .bind(amount)
        .fetch_one(db)
        .await
}

/// What an account has: a read, which no layer guards.
pub(crate) async fn account(
    State(pool): State<PgPool>,
    Path(name): Path<String>,
) -> Result<String, PayError> {
    let balance: Option<i64> = sqlx::query_scalar("SELECT balance FROM accounts WHERE name = $1")
        .bind(&name)
        .fetch_optional(&pool)
        .await?;
    Ok(format!("{name} has {}\n", balance.ok_or(PayError::NoAccount)?))
}

/// Why there is no payment. The answer decides what becomes of the transaction.
pub(crate) enum PayError {
    NoPayment,
    NoAccount,
    Insufficient { balance: i64 },
    Card(CardError),
    Database(sqlx::Error),
}

impl IntoResponse for PayError {
    fn into_response(self) -> Response {
        match self {
            // Outcomes: kept, and every retry is told the same.
            Self::NoPayment => (StatusCode::BAD_REQUEST, "pay something to somebody else\n").into_response(),
            Self::NoAccount => (StatusCode::NOT_FOUND, "there is no such account\n").into_response(),
            Self::Insufficient { balance } => {
                (StatusCode::PAYMENT_REQUIRED, format!("the balance is {balance}\n")).into_response()
            }
            Self::Card(CardError::Declined) => {
                (StatusCode::PAYMENT_REQUIRED, "the card was declined\n").into_response()
            }
            // Not outcomes: the transaction is rolled back, and a retry runs the handler again.
            Self::Card(CardError::Unknown(error)) => {
                eprintln!("the card provider: {error}");
                let said = "the card provider did not confirm; nothing is booked, send the same again\n";
                (StatusCode::BAD_GATEWAY, [(RETRY_AFTER, "1")], said).into_response()
            }
            Self::Database(error) if is_conflict(&error) => {
                let mut response = StatusCode::SERVICE_UNAVAILABLE.into_response();
                // The layer runs the handler again, or says so for us.
                response.extensions_mut().insert(Failure::Conflict);
                response
            }
            Self::Database(error) => {
                eprintln!("the database: {error}");
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
        }
    }
}

/// Whether Postgres undid the transaction because of a concurrent one: a serialization failure or a deadlock.
fn is_conflict(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    matches!(code.as_deref(), Some("40001" | "40P01"))
}

impl From<sqlx::Error> for PayError {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

impl From<CardError> for PayError {
    fn from(error: CardError) -> Self {
        Self::Card(error)
    }
}
