//! The card provider, as its client sees it.

use std::time::Duration;

use reqwest::StatusCode;
use serde::{Deserialize, Serialize};

/// How long the provider may take. A connection and the payer's lock are held meanwhile.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub(crate) struct Cards {
    http: reqwest::Client,
    charges: String,
}

#[derive(Serialize)]
struct Order<'a> {
    card: &'a str,
    amount: u32,
}

#[derive(Deserialize)]
struct Charge {
    id: String,
}

/// Why there is no charge to book.
pub(crate) enum CardError {
    /// There is none, for good.
    Declined,
    /// There may be one. Ask again with the same key.
    Unknown(reqwest::Error),
}

impl Cards {
    pub(crate) fn new(provider: &str) -> reqwest::Result<Self> {
        let http = reqwest::Client::builder().timeout(ANSWER_TIME_MAX).build()?;
        Ok(Self { http, charges: format!("{provider}/charges") })
    }

    /// Charges the card, unless that was done under this key before; the provider's id of the charge.
    pub(crate) async fn charge(&self, key: &str, card: &str, amount: u32) -> Result<String, CardError> {
        let order = Order { card, amount };
        let asking = self.http.post(&self.charges).header("idempotency-key", key).json(&order);
        let answer = asking.send().await?;
        if answer.status() == StatusCode::PAYMENT_REQUIRED {
            return Err(CardError::Declined);
        }
        let charge: Charge = answer.error_for_status()?.json().await?;
        Ok(charge.id)
    }
}

impl From<reqwest::Error> for CardError {
    fn from(error: reqwest::Error) -> Self {
        Self::Unknown(error)
    }
}
