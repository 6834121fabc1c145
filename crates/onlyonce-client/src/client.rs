//! A small client of its own: whole answers, and intents that outlive the process.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method};
use onlyonce_core::Key;
use reqwest::{IntoUrl, Request, Response};

use crate::answer::Answer;
use crate::error::Error;
#[cfg(feature = "journal")]
use crate::journal::Journal;
use crate::key;
use crate::middleware::{BuildError, http, sends_once};
use crate::send::{Frozen, Lost, Reply, Sender, Transport};
use crate::settings::Settings;

/// What a client's derived keys are for: see [`Call::intent`].
const INTENT_PURPOSE: &str = "intent";

/// A client whose every call is one operation: one key for all of its attempts. Clones share connections,
/// retry budget and journal.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use onlyonce_client::{Client, Settings};
///
/// let client = Client::new(Settings::default())?;
/// let answer = client.post("https://api.example/payments").body("amount=10").send().await?;
/// println!("{} {:?}", answer.status, answer.receipt);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    sender: Arc<Sender>,
    #[cfg(feature = "journal")]
    journal: Option<Journal>,
}

impl Client {
    /// A client that trusts what the system trusts.
    ///
    /// # Errors
    /// If the settings contradict each other, or TLS cannot be set up.
    pub fn new(settings: Settings) -> Result<Self, BuildError> {
        Self::with_http(http()?, settings)
    }

    /// A client on top of reqwest's, whose settings for redirects and retries are replaced.
    ///
    /// Its default headers go along on every redirect, to another origin too. Set no credentials there.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_http(http: reqwest::ClientBuilder, settings: Settings) -> Result<Self, BuildError> {
        Ok(Self {
            sender: Arc::new(Sender::new(settings)?),
            http: sends_once(http).build().map_err(BuildError::Http)?,
            #[cfg(feature = "journal")]
            journal: None,
        })
    }

    /// Keeps calls that name an [intent](Call::intent) in this journal.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use http::HeaderMap;
    /// use onlyonce_client::{Client, Journal, JournalOptions, Settings};
    ///
    /// let journal = Journal::open("/var/lib/shop/journal.db", JournalOptions::default()).await?;
    /// let client = Client::new(Settings::default())?.with_journal(journal);
    /// // What a crash left behind is finished first.
    /// for resumed in client.resume(&HeaderMap::new()).await? {
    ///     println!("{}: {:?}", resumed.intent, resumed.outcome);
    /// }
    /// let call = client.post("https://api.example/payments").body("amount=10");
    /// let answer = call.intent("charge order-4711").send().await?;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "journal")]
    #[must_use]
    pub fn with_journal(self, journal: Journal) -> Self {
        Self { journal: Some(journal), ..self }
    }

    /// A GET.
    pub fn get(&self, url: impl IntoUrl) -> Call {
        self.call(Method::GET, url)
    }

    /// A POST; it is given a key.
    pub fn post(&self, url: impl IntoUrl) -> Call {
        self.call(Method::POST, url)
    }

    /// A PUT.
    pub fn put(&self, url: impl IntoUrl) -> Call {
        self.call(Method::PUT, url)
    }

    /// A PATCH; it is given a key.
    pub fn patch(&self, url: impl IntoUrl) -> Call {
        self.call(Method::PATCH, url)
    }

    /// A DELETE.
    pub fn delete(&self, url: impl IntoUrl) -> Call {
        self.call(Method::DELETE, url)
    }

    /// A call with any method. POST and PATCH are given a key, others have one if the caller gives it.
    pub fn call(&self, method: Method, url: impl IntoUrl) -> Call {
        let (request, problem) = match self.http.request(method, url).build() {
            Ok(request) => (Some(request), None),
            Err(error) => (None, Some(format!("the URL cannot be used: {error}"))),
        };
        Call { client: self.clone(), request, problem, key: None, intent: None, keyless: false }
    }

    async fn run(&self, frozen: Frozen) -> Result<Answer, Error> {
        match self.sender.run(&mut &self.http, frozen, true).await? {
            Reply::Whole(answer) => Ok(answer),
            Reply::Arriving(_) => unreachable!("the answer was to be gathered"),
        }
    }
}

impl Transport for &reqwest::Client {
    async fn send(&mut self, request: Request) -> Result<Response, Lost> {
        self.execute(request).await.map_err(Lost::from)
    }
}

/// One call that is being prepared. A clone is another operation, unless both were given the same
/// [key](Self::key) or [intent](Self::intent).
#[derive(Debug)]
#[must_use = "a call does nothing until it is sent"]
pub struct Call {
    client: Client,
    request: Option<Request>,
    problem: Option<String>,
    key: Option<Key>,
    intent: Option<String>,
    keyless: bool,
}

impl Clone for Call {
    fn clone(&self) -> Self {
        let request = self.request.as_ref().map(|request| request.try_clone().expect("its body is bytes"));
        let Self { client, problem, key, intent, keyless, .. } = self;
        Self {
            client: client.clone(),
            request,
            problem: problem.clone(),
            key: key.clone(),
            intent: intent.clone(),
            keyless: *keyless,
        }
    }
}

impl Call {
    /// Adds a header line.
    pub fn header<N, V>(mut self, name: N, value: V) -> Self
    where
        N: TryInto<HeaderName>,
        V: TryInto<HeaderValue>,
    {
        match (name.try_into(), value.try_into(), &mut self.request) {
            (Ok(name), Ok(value), Some(request)) => {
                request.headers_mut().append(name, value);
            }
            (Ok(_), Ok(_), None) => {}
            (Err(_), ..) => self.problem = Some("a header's name is malformed".to_owned()),
            (Ok(name), ..) => self.problem = Some(format!("the value of the header {name} is malformed")),
        }
        self
    }

    /// Sets the body.
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        if let Some(request) = &mut self.request {
            *request.body_mut() = Some(body.into().into());
        }
        self
    }

    /// Sends this key. An `Idempotency-Key` header wins over it.
    pub fn key(self, key: Key) -> Self {
        Self { key: Some(key), ..self }
    }

    /// Says what the caller wants to happen once, such as `charge order-4711`.
    ///
    /// The key is [derived](crate::derive()) from it unless another one is given, so that the same intent has
    /// the same key after a crash and on another machine. With a journal (`Client::with_journal`) the call is
    /// written down before its first byte is sent, and the same intent again gives the recorded answer
    /// without a request.
    pub fn intent(self, intent: impl Into<String>) -> Self {
        Self { intent: Some(intent.into()), ..self }
    }

    /// Sends no key. A POST is then sent once, whatever becomes of it.
    pub fn keyless(self) -> Self {
        Self { keyless: true, ..self }
    }

    /// Sends the call, and again with the same key until an answer settles it.
    ///
    /// Any answer that is no refusal of the key is an `Ok`, a declined payment (402) as much as a 201. Dropping
    /// the future stops it at any point; with the same key or intent it can be gone on with.
    ///
    /// # Errors
    /// [`Error::work`] says whether the work may have happened.
    pub async fn send(self) -> Result<Answer, Error> {
        let Self { client, request, problem, key: given, intent, keyless } = self;
        let request = match (request, problem) {
            (Some(request), None) => request,
            (_, problem) => return Err(Error::request(problem.unwrap_or_default())),
        };
        let Some(intent) = intent else {
            let frozen = client.sender.freeze(request, given.as_ref(), keyless).await?;
            return client.run(frozen).await;
        };
        if intent.is_empty() || keyless {
            return Err(Error::request("an intent has a name, and is not sent without a key"));
        }
        let own_key = given.is_some() || request.headers().contains_key(&client.sender.settings.key_header);
        let key = given.unwrap_or_else(|| key::derive(INTENT_PURPOSE, &intent));
        let frozen = client.sender.freeze(request, Some(&key), false).await?;
        client.fulfil(intent, frozen, own_key).await
    }
}

#[cfg(not(feature = "journal"))]
impl Client {
    async fn fulfil(&self, _: String, frozen: Frozen, _: bool) -> Result<Answer, Error> {
        self.run(frozen).await
    }
}

#[cfg(feature = "journal")]
mod journalled {
    use futures_util::StreamExt;
    use http::HeaderMap;

    use super::*;
    use crate::decide::{Because, Work};
    use crate::journal::{Begun, Row, now_ms};
    use crate::send::Started;

    /// How many intents are resumed at a time.
    const RESUMED_AT_ONCE: usize = 8;

    /// The outcome of an intent that was left unfinished.
    #[derive(Debug)]
    #[non_exhaustive]
    pub struct Resumed {
        /// The intent.
        pub intent: String,
        /// The key that it was and is sent with; `None` if what the journal has of it cannot be read.
        pub key: Option<Key>,
        /// Its answer; [`Error::Unknown`] if it is older than the server's memory and was not sent, another
        /// error if it is still unfinished.
        pub outcome: Result<Answer, Error>,
    }

    impl Client {
        /// Goes on with an intent: its recorded answer, or its request sent, again if need be.
        pub(super) async fn fulfil(
            &self,
            intent: String,
            frozen: Frozen,
            own_key: bool,
        ) -> Result<Answer, Error> {
            let Some(journal) = &self.journal else { return self.run(frozen).await };
            loop {
                let key_header = &self.sender.settings.key_header;
                match journal.begin(&intent, &frozen, own_key, key_header).await? {
                    Begun::Answered(answered) => return answered,
                    Begun::Fresh(id) => return self.start(journal, id, frozen).await,
                    Begun::Open(row) => {
                        if let Some(result) = self.go_on(journal, row, frozen.request.headers()).await {
                            return result;
                        }
                    }
                }
            }
        }

        async fn start(&self, journal: &Journal, id: i64, frozen: Frozen) -> Result<Answer, Error> {
            let result = self.run(frozen).await;
            self.end(journal, id, result, false).await
        }

        /// Writes down how the attempts ended. `doubted` says that an earlier sender may have done the work.
        async fn end(
            &self,
            journal: &Journal,
            id: i64,
            result: Result<Answer, Error>,
            doubted: bool,
        ) -> Result<Answer, Error> {
            let idle = work(&result) == Work::NotDone;
            if !doubted && idle && must_change(&result) {
                journal.withdraw(id).await;
                return result;
            }
            let result = if doubted { result.map_err(Error::in_doubt) } else { result };
            journal.note(id, result, idle).await
        }

        /// Sends what the journal has unfinished, each with its key, and records the answers. Several at a
        /// time; each has the whole deadline.
        ///
        /// `withheld` are the header lines that the journal was told to [keep out](crate::JournalOptions).
        ///
        /// # Errors
        /// If the journal cannot be read, or there is none. What became of each intent is in the list.
        pub async fn resume(&self, withheld: &HeaderMap) -> Result<Vec<Resumed>, Error> {
            let Some(journal) = &self.journal else {
                return Err(Error::request("the client has no journal"));
            };
            let resumed = journal.unfinished().await?.into_iter().map(|(id, intent)| async move {
                let (key, outcome) = match journal.open_row(id).await {
                    Ok(Some(row)) => (Some(row.key.clone()), self.go_on(journal, row, withheld).await?),
                    // Somebody has finished it in the meantime.
                    Ok(None) => return None,
                    Err(error) => (None, Err(error.into())),
                };
                Some(Resumed { intent, key, outcome })
            });
            let outcomes: Vec<_> =
                futures_util::stream::iter(resumed).buffered(RESUMED_AT_ONCE).collect().await;
            Ok(outcomes.into_iter().flatten().collect())
        }

        /// Sends an unfinished intent as it was written down; `None` if it is unfinished no more.
        async fn go_on(
            &self,
            journal: &Journal,
            row: Row,
            withheld: &HeaderMap,
        ) -> Option<Result<Answer, Error>> {
            let (settings, started) = (&self.sender.settings, Started::now());
            if let Some(age) = row.forgotten(now_ms(), settings.server_retention, settings.deadline) {
                return Some(Err(Error::Unknown { intent: row.intent, key: row.key, age }));
            }
            let id = row.id;
            let doubted = match journal.join(id).await {
                Ok(Some(doubted)) => doubted,
                Ok(None) => return None,
                Err(error) => return Some(Err(error.into())),
            };
            let result = match row.frozen(withheld, started) {
                Ok(frozen) => self.run(frozen).await,
                Err(error) => Err(error),
            };
            Some(self.end(journal, id, result, doubted).await)
        }
    }

    /// Whether the attempts may have done the work.
    fn work(result: &Result<Answer, Error>) -> Work {
        match result {
            Ok(answer) => answer.arrived.work,
            Err(error) => error.work(),
        }
    }

    /// Whether something about the request must change before an attempt can end differently. If it is certain
    /// that nothing was done, the intent is then as if it had never been begun.
    fn must_change(result: &Result<Answer, Error>) -> bool {
        match result {
            Ok(answer) => !answer.lasts(),
            Err(Error::GaveUp(gave_up)) => gave_up.because == Because::Permanent,
            Err(Error::Refused(_)) => true,
            Err(_) => false,
        }
    }
}

#[cfg(feature = "journal")]
pub use journalled::Resumed;
