//! Intents on disk: what is written before a byte is sent, and what a later process makes of it.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::path::Path;
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};
use onlyonce_client::{
    Call, Client, Error, Journal, JournalError, JournalOptions, Key, Resumed, Settings, Work, derive,
};
use sqlx::{Connection, SqliteConnection};
use support::{Server, Step, answer, created, once, quick, refusal, replayed};

struct Desk {
    folder: tempfile::TempDir,
}

impl Desk {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("journal.db")
    }

    async fn journal(&self) -> Journal {
        Journal::open(self.path(), JournalOptions::default()).await.unwrap()
    }

    /// As a new process would have it.
    async fn client(&self) -> Client {
        self.client_with(quick(), JournalOptions::default()).await
    }

    async fn client_with(&self, settings: Settings, options: JournalOptions) -> Client {
        let journal = Journal::open(self.path(), options).await.unwrap();
        Client::new(settings).unwrap().with_journal(journal)
    }

    async fn sql(&self, statement: &'static str) {
        let mut connection = connect(&self.path()).await;
        sqlx::query(statement).execute(&mut connection).await.unwrap();
    }

    /// All that is on disk.
    fn bytes(&self) -> Vec<u8> {
        let files = std::fs::read_dir(self.folder.path()).unwrap().map(|file| file.unwrap().path());
        files.flat_map(|file| std::fs::read(file).unwrap()).collect()
    }
}

async fn connect(path: &Path) -> SqliteConnection {
    SqliteConnection::connect(&format!("sqlite:{}", path.display())).await.unwrap()
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

fn order(client: &Client, server: &Server) -> Call {
    client.post(server.url()).intent("order-4711").header("x-a", "1").header("x-a", "2").body("amount=10")
}

/// Leaves an intent behind as a process does that dies while it waits for the answer.
async fn die_waiting(client: &Client, server: &Server) {
    let before = server.requests().len();
    let sending = tokio::spawn(order(client, server).send());
    while server.requests().len() == before {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    sending.abort();
    assert!(sending.await.unwrap_err().is_cancelled());
}

fn stall() -> Step {
    Step::WorkAndStall(Duration::from_secs(60))
}

#[tokio::test]
async fn the_same_intent_again_is_the_recorded_answer_without_a_request() {
    let (desk, server) = (Desk::new(), Server::start([Step::WorkAndDrop, Step::Work(replayed())]));
    let first = order(&desk.client().await, &server).send().await.unwrap();
    assert!(!first.receipt.recorded);
    for _ in 0..2 {
        let again = order(&desk.client().await, &server).send().await.unwrap();
        assert!(again.receipt.recorded);
        assert_eq!((again.status, &again.headers, &again.body), (first.status, &first.headers, &first.body));
        assert_eq!((again.receipt.key.clone(), again.receipt.attempts), (first.receipt.key.clone(), 2));
        assert_eq!(again.url().as_str(), server.url());
    }
    assert_eq!(server.requests().len(), 2);
    assert_eq!(server.assert_one_operation(), derive("intent", "order-4711").as_str());
    let entries = desk.journal().await.entries().await.unwrap();
    assert_eq!((entries.len(), entries[0].answered.unwrap().1, entries[0].attempts), (1, 201, 2));
}

#[tokio::test]
async fn intent_key_and_request_are_on_disk_before_the_first_byte() {
    let (desk, server) = (Desk::new(), Server::start([stall()]));
    let client = desk.client().await;
    let sending = tokio::spawn(order(&client, &server).send());
    while server.requests().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // What another process sees while the server has the request and nothing was answered.
    let mut connection = connect(&desk.path()).await;
    let (intent, key, body): (String, String, Vec<u8>) =
        sqlx::query_as("SELECT intent, key, request_body FROM intents")
            .fetch_one(&mut connection)
            .await
            .unwrap();
    assert_eq!((&*intent, &*body), ("order-4711", &b"amount=10"[..]));
    assert_eq!(key, server.requests()[0].key());
    sending.abort();
}

#[tokio::test]
async fn resume_sends_what_is_unfinished_with_its_key_and_records_the_answer() {
    let (desk, server) = (Desk::new(), Server::start([stall(), Step::WorkAndDrop, Step::Work(replayed())]));
    die_waiting(&desk.client().await, &server).await;
    let resumed = desk.client().await.resume(&HeaderMap::new()).await.unwrap();
    let [Resumed { intent, key, outcome: Ok(answer), .. }] = &resumed[..] else { panic!("{resumed:?}") };
    assert_eq!((&**intent, answer.status.as_u16(), &*answer.body), ("order-4711", 201, &b"paid"[..]));
    assert_eq!(
        server.assert_one_operation(),
        key.as_ref().unwrap().as_str(),
        "the same bytes on the wire, header lines too"
    );
    assert_eq!(server.requests().len(), 3);
    // There is nothing more to resume, and the intent has its answer.
    assert!(desk.client().await.resume(&HeaderMap::new()).await.unwrap().is_empty());
    assert!(order(&desk.client().await, &server).send().await.unwrap().receipt.recorded);
    assert_eq!(server.requests().len(), 3);
}

#[tokio::test]
async fn the_same_intent_goes_on_where_a_crash_left_it() {
    let (desk, server) = (Desk::new(), Server::start([stall(), Step::Work(replayed())]));
    let own = Key::new("order 4711").unwrap();
    let client = desk.client().await;
    let sending = tokio::spawn(order(&client, &server).key(own.clone()).send());
    while server.requests().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    sending.abort();
    // The key that it was begun with stays its key, also where it is not given again.
    let answer = order(&desk.client().await, &server).send().await.unwrap();
    assert_eq!(answer.receipt.key, Some(own));
    assert_eq!(server.assert_one_operation(), "\"order 4711\"");
}

#[tokio::test]
async fn what_is_older_than_the_servers_memory_is_unknown_and_not_sent() {
    let (desk, server) = (Desk::new(), Server::start([stall()]));
    die_waiting(&desk.client().await, &server).await;
    desk.sql("UPDATE intents SET created_at = created_at - 86400000").await;
    for _ in 0..2 {
        let resumed = desk.client().await.resume(&HeaderMap::new()).await.unwrap();
        let [Resumed { outcome: Err(error @ Error::Unknown { age, .. }), .. }] = &resumed[..] else {
            panic!("{resumed:?}")
        };
        assert!(*age >= Duration::from_secs(86_400));
        assert_eq!(
            (error.work(), error.key().unwrap().as_str()),
            (Work::MayBeDone, &*server.requests()[0].key())
        );
        let error = order(&desk.client().await, &server).send().await.unwrap_err();
        assert!(matches!(error, Error::Unknown { .. }), "{error:?}");
    }
    // A clock that was set back hides the age.
    desk.sql("UPDATE intents SET created_at = created_at + 2 * 86400000").await;
    let error = order(&desk.client().await, &server).send().await.unwrap_err();
    assert!(matches!(error, Error::Unknown { .. }), "{error:?}");
    assert_eq!(server.requests().len(), 1);
    // The last attempt has to be early enough, not the first.
    desk.sql("UPDATE intents SET created_at = created_at - 86400000 - 86400000 + 59000").await;
    let error = order(&desk.client().await, &server).send().await.unwrap_err();
    assert!(matches!(error, Error::Unknown { .. }), "{error:?}");
    // Once a person has looked, it is forgotten, and the intent may be begun again.
    assert!(desk.journal().await.forget("order-4711").await.unwrap());
    assert!(!desk.journal().await.forget("order-4711").await.unwrap());
    die_waiting(&desk.client().await, &server).await;
    assert_eq!(server.requests().len(), 2);
}

#[tokio::test]
async fn an_intent_with_another_request_is_an_error_that_says_what_differs() {
    let (desk, server) = (Desk::new(), Server::start([Step::Work(created())]));
    let client = desk.client().await;
    order(&client, &server).send().await.unwrap();
    let put = client.put(server.url()).intent("order-4711").body("amount=10");
    for (call, expected) in [
        (order(&client, &server).body("amount=99"), &["body"][..]),
        (order(&client, &server).key(Key::new("k").unwrap()), &["key"]),
        (put, &["method"]),
        (client.post(format!("{}?a=1", server.url())).intent("order-4711"), &["url", "body"]),
    ] {
        let error = call.send().await.unwrap_err();
        assert_eq!(error.work(), Work::NotDone);
        let Error::IntentReused { differs, .. } = error else { panic!("{error:?}") };
        assert_eq!(differs, expected);
    }
    // Other header lines are no other request.
    assert!(order(&client, &server).header("x-trace", "2").send().await.unwrap().receipt.recorded);
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test]
async fn an_answer_that_is_not_the_last_word_is_not_recorded() {
    // Nothing was done and the request must change: the intent is as if it had never been begun.
    let withdrawn = [
        answer("401 Unauthorized", "", ""),
        refusal("401 Unauthorized", "caller-unverified", ""),
        refusal("413 Content Too Large", "request-too-large", ""),
    ];
    for said in withdrawn {
        let (desk, server) = (Desk::new(), Server::start([Step::Say(said), Step::Work(created())]));
        let client = desk.client().await;
        let _ = order(&client, &server).header("authorization", "old").send().await;
        assert_eq!(desk.journal().await.entries().await.unwrap(), []);
        let answer = order(&client, &server).header("authorization", "new").send().await.unwrap();
        assert!(!answer.receipt.recorded);
        assert_eq!(server.requests()[1].lines("authorization"), ["new"]);
        assert_eq!(server.requests()[0].key(), server.requests()[1].key());
    }
    // But an attempt before it may have done the work.
    let denied = Step::Say(answer("401 Unauthorized", "", ""));
    let (desk, server) = (Desk::new(), Server::start([Step::WorkAndDrop, denied, Step::Work(replayed())]));
    let client = desk.client().await;
    assert_eq!(order(&client, &server).send().await.unwrap().status, 401);
    let entries = desk.journal().await.entries().await.unwrap();
    assert!(
        entries[0].answered.is_none() && entries[0].last_error.as_ref().unwrap().contains("401"),
        "{entries:?}"
    );
    assert_eq!(order(&client, &server).send().await.unwrap().status, 201);
    server.assert_one_operation();
    // A refusal that leaves the outcome open stays for a person or a later call.
    let unknown = Step::Say(refusal("409 Conflict", "outcome-unknown", ""));
    let (desk, server) = (Desk::new(), Server::start([unknown, Step::Work(replayed())]));
    let client = desk.client().await;
    assert!(matches!(order(&client, &server).send().await, Err(Error::Refused(_))));
    assert_eq!(order(&client, &server).send().await.unwrap().status, 201);
}

#[tokio::test]
async fn what_may_have_been_done_is_never_taken_back() {
    // A server that says not to retry does not say that nothing was done.
    let failed = Step::Work(answer("500 Oh", "stripe-should-retry: false\r\n", ""));
    // The work was done when the 303 came; its result wants a token that stays behind.
    let denied = Server::start([Step::Say(answer("401 Unauthorized", "", ""))]);
    let see = |more: &str| {
        Step::Work(answer("303 See Other", &format!("location: {}\r\n{more}", denied.url()), ""))
    };
    for said in [failed, see(""), see("idempotent-replayed: true\r\n")] {
        let (desk, server) = (Desk::new(), Server::start([said.clone(), Step::Work(replayed())]));
        order(&desk.client().await, &server).send().await.unwrap();
        let entries = desk.journal().await.entries().await.unwrap();
        assert_eq!((entries.len(), entries[0].answered), (1, None), "{said:?}: {entries:?}");
        // Once the server has forgotten its key, it is not sent again.
        desk.sql("UPDATE intents SET created_at = created_at - 86400000").await;
        let error = order(&desk.client().await, &server).send().await.unwrap_err();
        assert!(matches!(error, Error::Unknown { .. }), "{said:?}: {error:?}");
        assert_eq!(server.requests().len(), 1);
    }
}

#[tokio::test]
async fn an_intent_that_was_sent_before_is_never_said_not_to_be_done() {
    let (desk, server) = (Desk::new(), Server::start([stall()]));
    die_waiting(&desk.client().await, &server).await;
    desk.sql("UPDATE intents SET url = 'http://127.0.0.1:9/payments'").await;
    let mut settings = quick();
    settings.deadline = Duration::from_millis(200);
    for _ in 0..2 {
        let client = desk.client_with(settings.clone(), JournalOptions::default()).await;
        let resumed = client.resume(&HeaderMap::new()).await.unwrap();
        let [Resumed { outcome: Err(error), .. }] = &resumed[..] else { panic!("{resumed:?}") };
        assert_eq!(error.work(), Work::MayBeDone, "the host is gone, what it has done is not: {error}");
        let said = desk.journal().await.entries().await.unwrap()[0].last_error.clone().unwrap();
        assert!(said.contains("may have been done"), "{said}");
    }
    // The same of one that ended by itself, without a word from the server.
    let (desk, server) = (Desk::new(), Server::start([Step::WorkAndDrop]));
    let client = desk.client_with(once(), JournalOptions::default()).await;
    assert_eq!(order(&client, &server).send().await.unwrap_err().work(), Work::MayBeDone);
    desk.sql("UPDATE intents SET url = 'http://127.0.0.1:9/payments'").await;
    for _ in 0..2 {
        let resumed = client.resume(&HeaderMap::new()).await.unwrap();
        assert_eq!(resumed[0].outcome.as_ref().unwrap_err().work(), Work::MayBeDone);
    }
    let refused = Server::start([Step::Say(refusal("401 Unauthorized", "caller-unverified", ""))]);
    let (desk, server) = (Desk::new(), Server::start([stall()]));
    die_waiting(&desk.client().await, &server).await;
    let url: &'static str =
        Box::leak(format!("UPDATE intents SET url = '{}'", refused.url()).into_boxed_str());
    desk.sql(url).await;
    let resumed = desk.client().await.resume(&HeaderMap::new()).await.unwrap();
    assert_eq!(resumed[0].outcome.as_ref().unwrap_err().work(), Work::MayBeDone);
}

#[tokio::test]
async fn an_intent_of_which_nothing_was_ever_sent_is_not_in_doubt() {
    let desk = Desk::new();
    for _ in 0..3 {
        let client = desk.client_with(once(), JournalOptions::default()).await;
        let error = client.post("http://127.0.0.1:9/").intent("order-4711").send().await.unwrap_err();
        assert_eq!(error.work(), Work::NotDone, "{error}");
    }
    // So that another token may be tried, it is taken back.
    let denied = Server::start([Step::Say(answer("401 Unauthorized", "", "")), Step::Work(created())]);
    let url: &'static str =
        Box::leak(format!("UPDATE intents SET url = '{}'", denied.url()).into_boxed_str());
    desk.sql(url).await;
    let client = desk.client().await;
    let send = |token: &'static str| {
        client.post(denied.url()).intent("order-4711").header("authorization", token).send()
    };
    assert_eq!(send("old").await.unwrap().status, 401);
    assert_eq!(desk.journal().await.entries().await.unwrap(), []);
    assert_eq!(send("new").await.unwrap().status, 201);
    assert_eq!(denied.requests()[1].lines("authorization"), ["new"]);
}

#[tokio::test]
async fn work_that_was_done_and_its_answer_not_kept_is_finished() {
    let not_kept = refusal("409 Conflict", "response-not-kept", r#", "original_status": 201"#);
    let (desk, server) = (Desk::new(), Server::start([Step::WorkAndDrop, Step::Say(not_kept)]));
    for _ in 0..3 {
        let error = order(&desk.client().await, &server).send().await.unwrap_err();
        assert_eq!(error.work(), Work::Done);
        assert!(error.to_string().contains("the work was done"), "{error}");
        let Error::Refused(refused) = error else { panic!("{error:?}") };
        assert_eq!((&*refused.code, refused.original_status), ("response-not-kept", Some(201)));
    }
    assert!(desk.client().await.resume(&HeaderMap::new()).await.unwrap().is_empty());
    assert_eq!(server.requests().len(), 2);
    assert!(desk.journal().await.entries().await.unwrap()[0].answered.is_some());
}

#[tokio::test]
async fn the_key_is_kept_whatever_is_kept_out() {
    let (desk, server) = (Desk::new(), Server::start([stall(), Step::Work(replayed())]));
    let mut options = JournalOptions::default();
    options.keep_out = vec![onlyonce_client::IDEMPOTENCY_KEY];
    let client = desk.client_with(quick(), options.clone()).await;
    let sending = tokio::spawn(order(&client, &server).key(Key::new("own").unwrap()).send());
    while server.requests().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    sending.abort();
    let client = desk.client_with(quick(), options).await;
    order(&client, &server).send().await.unwrap();
    assert_eq!(server.assert_one_operation(), "own");
}

#[tokio::test]
async fn an_unfinished_intent_that_cannot_be_read_is_not_passed_over() {
    let (desk, server) = (Desk::new(), Server::start([stall(), Step::Work(replayed())]));
    let client = desk.client().await;
    die_waiting(&client, &server).await;
    desk.sql("UPDATE intents SET request_head = x'00'").await;
    for _ in 0..2 {
        let resumed = client.resume(&HeaderMap::new()).await.unwrap();
        let [Resumed { intent, outcome: Err(error), .. }] = &resumed[..] else { panic!("{resumed:?}") };
        assert_eq!((&**intent, error.work()), ("order-4711", Work::MayBeDone), "{error}");
        let error = order(&client, &server).send().await.unwrap_err();
        assert!(matches!(error, Error::Journal(JournalError::Damaged(_))), "{error:?}");
    }
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test]
async fn a_disk_that_is_full_sends_nothing_and_hides_no_answer() {
    let (desk, server) = (Desk::new(), Server::start([Step::Work(created())]));
    let client = desk.client().await;
    desk.sql("CREATE TRIGGER no_answer BEFORE UPDATE OF answered_at ON intents BEGIN SELECT RAISE(FAIL, 'full'); END")
        .await;
    let first = order(&client, &server).send().await.unwrap();
    assert_eq!((first.status.as_u16(), first.receipt.recorded), (201, false), "the answer is the caller's");
    assert!(desk.journal().await.entries().await.unwrap()[0].answered.is_none());
    desk.sql("CREATE TRIGGER no_intent BEFORE INSERT ON intents BEGIN SELECT RAISE(FAIL, 'full'); END").await;
    let error = client.post(server.url()).intent("2").send().await.unwrap_err();
    assert!(matches!(error, Error::Journal(JournalError::Failed(_))), "{error:?}");
    assert_eq!(server.requests().len(), 1);
    // With room again, the server gives the answer again.
    desk.sql("DROP TRIGGER no_answer").await;
    order(&client, &server).send().await.unwrap();
    assert!(order(&client, &server).send().await.unwrap().receipt.recorded);
    server.assert_one_operation();
}

#[tokio::test]
async fn a_lasting_answer_of_any_status_is_recorded() {
    for status in ["204 No Content", "402 Payment Required", "409 Conflict", "422 No"] {
        let head = if status.starts_with("204") {
            format!("HTTP/1.1 {status}\r\n\r\n")
        } else {
            answer(status, "", "no")
        };
        let (desk, server) = (Desk::new(), Server::start([Step::Work(head)]));
        let client = desk.client().await;
        let first = order(&client, &server).send().await.unwrap();
        let again = order(&client, &server).send().await.unwrap();
        assert_eq!((again.status, &again.body, again.receipt.recorded), (first.status, &first.body, true));
        assert_eq!(server.requests().len(), 1, "{status}");
    }
}

#[tokio::test]
async fn several_processes_with_one_intent_at_once_are_one_effect_and_one_answer() {
    // Each request is answered with other bytes, as by a server that stamps its answers, and late enough that
    // several are under way.
    let paid = |number| answer("201 Created", "", &format!("paid {number}"));
    let script = (0..200).map(|number| Step::WorkLate(Duration::from_millis(500), paid(number)));
    let (desk, server) = (Desk::new(), Server::start(script));
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let client = desk.client().await;
        for _ in 0..4 {
            calls.spawn(order(&client, &server).send());
        }
    }
    let answers: std::collections::HashSet<_> =
        calls.join_all().await.into_iter().map(|answer| answer.unwrap().body).collect();
    assert_eq!(answers.len(), 1, "the first that is recorded is everybody's: {answers:?}");
    assert!(server.requests().len() > 1, "several have sent");
    server.assert_one_operation();
}

#[tokio::test]
async fn one_that_was_joined_is_not_withdrawn() {
    let stall_then_deny = [stall(), Step::Say(answer("401 Unauthorized", "", "")), Step::Work(replayed())];
    let (desk, server) = (Desk::new(), Server::start(stall_then_deny));
    let client = desk.client().await;
    die_waiting(&client, &server).await;
    // The one who goes on does not know what the first one's attempts did.
    assert_eq!(order(&client, &server).send().await.unwrap().status, 401);
    assert_eq!(desk.journal().await.entries().await.unwrap().len(), 1);
    assert_eq!(order(&client, &server).send().await.unwrap().status, 201);
    server.assert_one_operation();

    // Nor does the one who began know what those do who joined.
    let late = Step::SayLate(Duration::from_millis(900), answer("401 Unauthorized", "", ""));
    let (desk, server) = (Desk::new(), Server::start([late, stall(), Step::Work(replayed())]));
    let client = desk.client().await;
    let first = tokio::spawn(order(&client, &server).send());
    while server.requests().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    die_waiting(&desk.client().await, &server).await;
    assert_eq!(first.await.unwrap().unwrap().status, 401);
    assert_eq!(desk.client().await.resume(&HeaderMap::new()).await.unwrap().len(), 1);
    server.assert_one_operation();
}

#[tokio::test]
async fn a_journal_that_is_full_says_so_and_sends_nothing() {
    let mut few = JournalOptions::default();
    few.intents_max = 2;
    let mut small = JournalOptions::default();
    small.bytes_max = 2_000;
    for (options, body) in [(few, "amount=10".to_owned()), (small, "x".repeat(800))] {
        let (desk, server) = (Desk::new(), Server::start([Step::Work(created())]));
        let client = desk.client_with(quick(), options.clone()).await;
        let send = |intent: &'static str| client.post(server.url()).intent(intent).body(body.clone()).send();
        send("1").await.unwrap();
        send("2").await.unwrap();
        let error = send("3").await.unwrap_err();
        assert!(matches!(error, Error::Journal(JournalError::Full { intents: 2, .. })), "{error:?}");
        assert_eq!(error.work(), Work::NotDone);
        assert!(send("1").await.unwrap().receipt.recorded, "what is in it is still there");
        assert_eq!(server.requests().len(), 2);
        // Old answers make room, by themselves.
        desk.sql("UPDATE intents SET answered_at = answered_at - 31 * 86400000 WHERE intent = '1'").await;
        send("3").await.unwrap();
    }
}

#[tokio::test]
async fn old_answers_are_purged_and_unfinished_intents_never() {
    let (desk, server) =
        (Desk::new(), Server::start([Step::Work(created()), Step::Work(created()), stall()]));
    let client = desk.client().await;
    for intent in ["old", "new"] {
        client.post(server.url()).intent(intent).send().await.unwrap();
    }
    die_waiting(&client, &server).await;
    desk.sql("UPDATE intents SET answered_at = answered_at - 30 * 86400000 WHERE intent = 'old'").await;
    desk.sql("UPDATE intents SET created_at = 0 WHERE intent = 'order-4711'").await;
    assert_eq!(client_intents(&desk).await, ["new", "order-4711"], "opening it purges it");
    assert_eq!(desk.journal().await.purge().await.unwrap(), 0);
}

async fn client_intents(desk: &Desk) -> Vec<String> {
    desk.journal().await.entries().await.unwrap().into_iter().map(|entry| entry.intent).collect()
}

#[tokio::test]
async fn headers_that_are_kept_out_are_not_on_disk_and_wanted_again() {
    let (desk, server) = (Desk::new(), Server::start([stall(), Step::Work(replayed())]));
    let mut options = JournalOptions::default();
    options.keep_out = vec![AUTHORIZATION];
    let client = desk.client_with(quick(), options.clone()).await;
    let call = order(&client, &server).header("authorization", "Bearer secret-1");
    let sending = tokio::spawn(call.send());
    while server.requests().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    sending.abort();
    assert!(!contains(&desk.bytes(), "secret-1"));
    assert!(contains(&desk.bytes(), "amount=10"), "the search finds what is there");
    let resumed = client.resume(&HeaderMap::new()).await.unwrap();
    let [Resumed { outcome: Err(error), .. }] = &resumed[..] else { panic!("{resumed:?}") };
    assert!(error.to_string().contains("authorization"), "{error}");
    assert_eq!(server.requests().len(), 1);
    let again: HeaderMap =
        [(AUTHORIZATION, HeaderValue::from_static("Bearer secret-1"))].into_iter().collect();
    client.resume(&again).await.unwrap()[0].outcome.as_ref().unwrap();
    assert_eq!(server.requests()[1].lines("authorization"), ["Bearer secret-1"]);
    let keys = server.requests().iter().map(support::Request::key).collect::<std::collections::HashSet<_>>();
    assert_eq!(keys.len(), 1);
}

#[cfg(unix)]
#[tokio::test]
async fn the_file_is_its_owners_and_credentials_leave_it_with_the_answer() {
    use std::os::unix::fs::PermissionsExt;

    let (desk, server) = (Desk::new(), Server::start([stall(), Step::Work(replayed())]));
    let client = desk.client().await;
    // Long enough for pages of its own, which are free afterwards.
    let token = format!("Bearer {}secret-2", "x".repeat(12_000));
    let sending = tokio::spawn(order(&client, &server).header("authorization", token).send());
    while server.requests().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    sending.abort();
    for file in std::fs::read_dir(desk.folder.path()).unwrap() {
        let file = file.unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{file:?}");
    }
    // From the log into the file, so that nothing but its own erasing removes it.
    desk.sql("PRAGMA wal_checkpoint(TRUNCATE)").await;
    assert!(contains(&desk.bytes(), "secret-2"));
    client.resume(&HeaderMap::new()).await.unwrap()[0].outcome.as_ref().unwrap();
    desk.sql("PRAGMA wal_checkpoint(TRUNCATE)").await;
    assert!(!contains(&desk.bytes(), "secret-2"));
}

#[cfg(unix)]
#[tokio::test]
async fn an_empty_file_that_was_there_becomes_its_owners_alone() {
    use std::os::unix::fs::PermissionsExt;

    let (desk, server) = (Desk::new(), Server::start([stall()]));
    std::fs::write(desk.path(), "").unwrap();
    std::fs::set_permissions(desk.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
    die_waiting(&desk.client().await, &server).await;
    for file in std::fs::read_dir(desk.folder.path()).unwrap() {
        let file = file.unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{file:?}");
    }
}

#[tokio::test]
async fn a_file_that_is_no_journal_is_refused_and_left_alone() {
    let desk = Desk::new();
    std::fs::write(desk.path(), "notes, not a database, and long enough to be read as one".repeat(40))
        .unwrap();
    let before = desk.bytes();
    let opened = Journal::open(desk.path(), JournalOptions::default()).await;
    assert!(matches!(opened, Err(JournalError::Refused(_))), "{opened:?}");
    assert_eq!(desk.bytes(), before);

    let desk = Desk::new();
    std::fs::write(desk.path(), "").unwrap();
    desk.sql("CREATE TABLE theirs (a)").await;
    let before = desk.bytes();
    let opened = Journal::open(desk.path(), JournalOptions::default()).await;
    assert!(matches!(opened, Err(JournalError::Refused(_))), "{opened:?}");

    assert_eq!(desk.bytes(), before);

    let desk = Desk::new();
    drop(desk.journal().await);
    desk.sql("PRAGMA user_version = 2").await;
    let opened = Journal::open(desk.path(), JournalOptions::default()).await;
    assert!(matches!(opened, Err(JournalError::Refused(_))), "{opened:?}");

    let nowhere = desk.folder.path().join("absent/journal.db");
    assert!(matches!(Journal::open(nowhere, JournalOptions::default()).await, Err(JournalError::Refused(_))));
}

#[tokio::test]
async fn a_journal_that_is_damaged_sends_nothing_and_says_that_the_work_may_be_done() {
    let (desk, server) = (Desk::new(), Server::start([stall()]));
    die_waiting(&desk.client().await, &server).await;
    desk.sql("PRAGMA wal_checkpoint(TRUNCATE)").await;
    let mut bytes = std::fs::read(desk.path()).unwrap();
    let pages = bytes.len();
    bytes[4_096..pages].fill(0xa5);
    for log in ["-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{log}", desk.path().display()));
    }
    std::fs::write(desk.path(), &bytes).unwrap();
    let error = match Journal::open(desk.path(), JournalOptions::default()).await {
        Err(error) => Error::from(error),
        Ok(journal) => {
            let client = Client::new(quick()).unwrap().with_journal(journal);
            order(&client, &server).send().await.unwrap_err()
        }
    };
    assert_eq!(error.work(), Work::MayBeDone, "{error:?}");
    assert_eq!(server.requests().len(), 1);
}

/// A backup has the intent as unfinished although it was answered since.
#[tokio::test]
async fn a_journal_from_a_backup_sends_the_same_again_and_nothing_once_it_is_too_old() {
    let (desk, server) = (Desk::new(), Server::start([stall(), Step::Work(replayed())]));
    die_waiting(&desk.client().await, &server).await;
    let backup = desk.folder.path().join("backup.db");
    let copy: &'static str = format!("VACUUM INTO '{}'", backup.display()).leak();
    desk.sql(copy).await;
    order(&desk.client().await, &server).send().await.unwrap();
    let restored = Desk::new();
    std::fs::copy(&backup, restored.path()).unwrap();
    let resumed = restored.client().await.resume(&HeaderMap::new()).await.unwrap();
    assert!(resumed[0].outcome.as_ref().unwrap().receipt.replayed);
    server.assert_one_operation();
    let sent = server.requests().len();
    let restored = Desk::new();
    std::fs::copy(&backup, restored.path()).unwrap();
    restored.sql("UPDATE intents SET created_at = created_at - 86400000").await;
    let resumed = restored.client().await.resume(&HeaderMap::new()).await.unwrap();
    assert!(matches!(resumed[0].outcome, Err(Error::Unknown { .. })), "{resumed:?}");
    assert_eq!(server.requests().len(), sent);
}

#[tokio::test]
async fn two_resumes_at_once_are_one_effect_and_one_answer() {
    let paid = |number| answer("201 Created", "", &format!("paid {number}"));
    let late = (0..20).map(|number| Step::WorkLate(Duration::from_millis(300), paid(number)));
    let (desk, server) = (Desk::new(), Server::start([stall()].into_iter().chain(late)));
    die_waiting(&desk.client().await, &server).await;
    let (first, second) = (desk.client().await, desk.client().await);
    let none = HeaderMap::new();
    let (first, second) = tokio::join!(first.resume(&none), second.resume(&none));
    let bodies: std::collections::HashSet<_> = [first, second]
        .into_iter()
        .flat_map(Result::unwrap)
        .map(|resumed| resumed.outcome.unwrap().body)
        .collect();
    assert_eq!(bodies.len(), 1, "{bodies:?}");
    assert_eq!(server.requests().len(), 3, "both have sent");
    server.assert_one_operation();
}

#[tokio::test]
async fn many_processes_open_a_new_journal_at_once() {
    let desk = Desk::new();
    let mut opening = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let path = desk.path();
        opening.spawn(async move { Journal::open(path, JournalOptions::default()).await });
    }
    assert!(opening.join_all().await.iter().all(Result::is_ok));
}
