//! What is done for an event: the invoice is marked as paid, and its receipt mailed.

use std::time::Duration;

use onlyonce::{Execution, Failed};
use serde::{Deserialize, Serialize};
use sqlx::SqlitePool;
use tokio::fs::OpenOptions;
use tokio::io::AsyncWriteExt;

use crate::webhook::{Done, Event};

/// Why an event is not acted upon, now or ever.
#[derive(Deserialize, Serialize)]
pub(crate) struct Rejected {
    rejected: String,
}

pub(crate) async fn send(shop: &SqlitePool, event: &Event, execution: &Execution) -> Result<Done, Failed> {
    let invoice: Option<(String, i64)> = sqlx::query_as("SELECT customer, amount FROM invoices WHERE id = ?")
        .bind(&event.invoice)
        .fetch_optional(shop)
        .await
        // Nothing was done yet, so the next delivery may start at once.
        .map_err(Failed::release)?;
    let Some((customer, amount)) = invoice else {
        // It may be on its way: events overtake what they are about.
        return Err(Failed::release("there is no such invoice yet"));
    };
    if amount != event.amount {
        let rejected = format!("the invoice is over {amount}, not {}", event.amount);
        return Err(Failed::keep(&Rejected { rejected }));
    }
    // The same however often it is written: this needs no key. From here on an error says nothing about what was
    // done, and `?` leaves the key to its lease.
    sqlx::query("UPDATE invoices SET paid_by = ? WHERE id = ?")
        .bind(&event.id)
        .bind(&event.invoice)
        .execute(shop)
        .await?;
    // This does: the same on every attempt, for the mailer to see that it is the same mail.
    let key = execution.downstream("receipt").uuid();
    mail(&key, &customer, amount).await?;
    Ok(Done { invoice: event.invoice.clone(), receipt: key })
}

/// Stands for a mail provider that goes by keys, and takes a second: what is mailed is a line in `receipts.txt`.
async fn mail(key: &str, customer: &str, amount: i64) -> std::io::Result<()> {
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut mails = OpenOptions::new().create(true).append(true).open("receipts.txt").await?;
    mails.write_all(format!("{key} to {customer}: {amount} received, thank you\n").as_bytes()).await?;
    mails.flush().await
}
