//! What the page asks for, as JSON. Every refusal says what to do.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::extract::{Query as UrlQuery, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use vnplug_store::extract::{Extract, ExtractError, Query, Step, parse_time};
use vnplug_store::filter::{Filter, FilterError};

use crate::server::{DOWNLOADS, Site};
use crate::table::Table;

/// An answer that is none.
#[derive(Debug)]
pub(crate) struct Refusal {
    status: StatusCode,
    text: String,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { status, text }
    }

    pub(crate) fn bad(text: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, text)
    }

    pub(crate) fn forbidden(text: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, text)
    }

    pub(crate) fn not_found(text: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, text)
    }

    fn broken(text: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, text)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, json_response(&json!({ "error": self.text }))).into_response()
    }
}

impl From<ExtractError> for Refusal {
    fn from(error: ExtractError) -> Self {
        match error {
            ExtractError::Filter(error) => error.into(),
            ExtractError::Place(..) => Self::broken(error.to_string()),
        }
    }
}

impl From<FilterError> for Refusal {
    fn from(error: FilterError) -> Self {
        match error {
            FilterError::Expression(_) => Self::bad(format!(
                "{error}. Filters are those of tcpdump (pcap-filter), for example: \
                 host 10.1.2.3 and tcp port 443"
            )),
            FilterError::NoCompiler(_) => Self::broken(error.to_string()),
        }
    }
}

pub(crate) fn json_response(value: &Value) -> Response {
    (
        [(header::CONTENT_TYPE, "application/json")],
        value.to_string(),
    )
        .into_response()
}

/// The parameters of a request.
#[derive(Debug)]
pub(crate) struct Parameters(Vec<(String, String)>);

impl Parameters {
    /// Those of an address, which may have these names.
    pub(crate) fn of(uri: &Uri, known: &[&str]) -> Result<Self, Refusal> {
        let UrlQuery(list) = UrlQuery::<Vec<(String, String)>>::try_from_uri(uri)
            .map_err(|error| Refusal::bad(format!("the address cannot be read: {error}")))?;
        for (n, (name, _)) in list.iter().enumerate() {
            if !known.contains(&name.as_str()) {
                let known = known.join(", ");
                return Err(Refusal::bad(format!(
                    "there is no parameter {name:?}; there are: {known}"
                )));
            }
            if list[..n].iter().any(|(other, _)| other == name) {
                return Err(Refusal::bad(format!("{name} is given twice")));
            }
        }
        Ok(Self(list))
    }

    /// A parameter's value; an empty one counts as not given.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let (_, value) = self.0.iter().find(|(known, _)| known == name)?;
        Some(value.as_str()).filter(|value| !value.is_empty())
    }

    fn time(&self, name: &str) -> Result<Option<u64>, Refusal> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now_ns = now.unwrap_or_default().as_nanos().try_into();
        let read = |text| parse_time(text, now_ns.unwrap_or(u64::MAX));
        let time = self.get(name).map(read).transpose();
        time.map_err(|error| Refusal::bad(format!("{name}: {error}")))
    }

    /// `from` and `to`.
    pub(crate) fn range(&self) -> Result<(Option<u64>, Option<u64>), Refusal> {
        let (from, to) = (self.time("from")?, self.time("to")?);
        match (from, to) {
            (Some(from), Some(to)) if from >= to => Err(Refusal::bad(
                "from is not before to: packets are those from the first time on, before the second",
            )),
            range => Ok(range),
        }
    }

    /// `filter`, not compiled yet.
    pub(crate) fn filter(&self) -> Result<String, Refusal> {
        let filter = self.get("filter").unwrap_or_default();
        if filter.len() > MAX_FILTER_BYTES {
            return Err(Refusal::bad(format!(
                "the filter has more than {MAX_FILTER_BYTES} bytes: use `vnplug extract`"
            )));
        }
        Ok(filter.to_owned())
    }
}

/// `/api/now`: what the daemon does, or that it does not answer.
pub(crate) async fn now(State(shared): State<Arc<Site>>, uri: Uri) -> Result<Response, Refusal> {
    Parameters::of(&uri, &[])?;
    let json = shared.live.answer().await.map_err(Refusal::broken)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}

/// `/api/recordings`: what there is.
pub(crate) async fn recordings(
    State(shared): State<Arc<Site>>,
    uri: Uri,
) -> Result<Response, Refusal> {
    Parameters::of(&uri, &[])?;
    let downloads = DOWNLOADS - shared.downloads.available_permits();
    let places: Vec<String> = shared
        .places
        .iter()
        .map(|place| place.display().to_string())
        .collect();
    let all = with_table(&shared, |table| table.timeline(None, None, 1).to_json()).await?;
    let names = [
        "all",
        "total",
        "segments",
        "files",
        "len_bytes",
        "pending_bytes",
        "recordings",
        "problems",
    ];
    let mut answer = json!({ "places": places, "downloads": downloads });
    for name in names {
        answer[name] = all[name].clone();
    }
    add_damage(&shared, &mut answer);
    Ok(json_response(&answer))
}

/// `/api/timeline?from=&to=&bins=`
pub(crate) async fn timeline(
    State(shared): State<Arc<Site>>,
    uri: Uri,
) -> Result<Response, Refusal> {
    let parameters = Parameters::of(&uri, &["from", "to", "bins"])?;
    let (from, to) = parameters.range()?;
    let bins = match parameters.get("bins") {
        None => BINS,
        Some(text) => text
            .parse()
            .ok()
            .filter(|bins| (1..=MAX_BINS).contains(bins))
            .ok_or_else(|| Refusal::bad(format!("bins is a number from 1 to {MAX_BINS}")))?,
    };
    let made = with_table(&shared, move |table| table.timeline(from, to, bins)).await?;
    let mut answer = made.to_json();
    add_damage(&shared, &mut answer);
    Ok(json_response(&answer))
}

/// Tells what downloads met, too, of files that are still there.
fn add_damage(shared: &Site, answer: &mut Value) {
    let mut damage = shared.damage.lock().unwrap_or_else(PoisonError::into_inner);
    damage.retain(|path, _| path.exists());
    let Some(problems) = answer["problems"].as_array_mut() else {
        return;
    };
    for text in damage.values().map(|text| json!(text)) {
        if !problems.contains(&text) {
            problems.push(text);
        }
    }
}

/// `/api/check?filter=`: whether a filter can be used; what is wrong with it is no refusal here.
pub(crate) async fn check(State(shared): State<Arc<Site>>, uri: Uri) -> Result<Response, Refusal> {
    let filter = Parameters::of(&uri, &["filter"])?.filter()?;
    let checked = work(&shared.filters, move || {
        Filter::new(&filter).map(drop).map_err(Refusal::from)
    })
    .await?;
    Ok(json_response(&match checked {
        Ok(()) => json!({ "ok": true }),
        Err(refusal) => json!({ "ok": false, "error": refusal.text }),
    }))
}

/// `/api/count?from=&to=&filter=`: how many packets a download would have, as far as that is found out
/// within a second.
pub(crate) async fn count(State(shared): State<Arc<Site>>, uri: Uri) -> Result<Response, Refusal> {
    let parameters = Parameters::of(&uri, &["from", "to", "filter"])?;
    let (range, filter) = (parameters.range()?, parameters.filter()?);
    let places = Arc::clone(&shared);
    let counted = work(&shared.filters, move || -> Result<Value, Refusal> {
        let deadline = Instant::now() + COUNT_FOR;
        let mut search = open(&places, range, &filter)?;
        let (mut packets, mut bytes, mut complete) = (0_u64, 0_u64, false);
        while !complete && Instant::now() < deadline {
            match search.step()? {
                Step::Packet(packet) => {
                    packets += 1;
                    bytes += packet.bytes.len() as u64;
                }
                Step::Looking => {}
                Step::End => complete = true,
            }
        }
        let problems: Vec<String> = search.problems().iter().map(ToString::to_string).collect();
        Ok(json!({
            "packets": packets, "bytes": bytes, "complete": complete, "problems": problems,
            "losses": search.losses().words(),
        }))
    })
    .await??;
    Ok(json_response(&counted))
}

/// Begins to look for packets; blocks.
pub(crate) fn open(
    shared: &Site,
    (from, to): (Option<u64>, Option<u64>),
    filter: &str,
) -> Result<Extract, Refusal> {
    let query = Query {
        from_ns: from.unwrap_or(0),
        to_ns: to.unwrap_or(u64::MAX),
        filter: Filter::new(filter)?,
    };
    Ok(Extract::open(&shared.places, query)?)
}

/// Asks the table, after it has looked what is new.
async fn with_table<T: Send + 'static>(
    shared: &Arc<Site>,
    ask: impl FnOnce(&Table) -> T + Send + 'static,
) -> Result<T, Refusal> {
    let of = Arc::clone(shared);
    work(&shared.work, move || {
        let mut table = of.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.refresh(LOOK_FOR);
        ask(&table)
    })
    .await
}

/// Runs what blocks; few at a time, the others wait.
async fn work<T: Send + 'static>(
    turns: &Arc<Semaphore>,
    job: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Refusal> {
    let turn = Arc::clone(turns).acquire_owned().await;
    // The job goes on when its client is gone, and so keeps its turn.
    let done = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        job()
    })
    .await;
    done.map_err(|error| Refusal::broken(format!("this failed: {error}; look at the server's log")))
}

const BINS: u64 = 600;
const MAX_BINS: u64 = 4000;
const MAX_FILTER_BYTES: usize = 2000;
const COUNT_FOR: Duration = Duration::from_secs(1);
/// How long a request looks at files that are new; the next one goes on.
const LOOK_FOR: Duration = Duration::from_millis(500);
