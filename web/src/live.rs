//! What the daemon does now, as JSON for the page: what `vnplug top` shows, from the same course of answers.
//!
//! The daemon is asked only while somebody looks. Names of virtual machines, groups and readers are strangers' words: nothing
//! in them is invisible or turns the direction of writing.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use serde_json::{Value, json};
use vnplug::Counted;
use vnplug_ring::counters::{Course, Curve, HISTORY, PortRow, STAGES, SourceRow, VmRow, key};

use crate::ask::{Asked, Told};
use crate::text::escape;

/// Asks the daemon at this socket.
pub(crate) fn asked(socket: PathBuf) -> Asked {
    let mut live = Live {
        place: escape(&socket.display().to_string()),
        ..Live::default()
    };
    Asked::new(socket, move |at, told| {
        live.hear(at, told);
        Ok(Bytes::from(live.to_json(Instant::now()).to_string()))
    })
}

/// The daemon, as far as it was watched.
#[derive(Debug, Default)]
struct Live {
    place: String,
    server: String,
    course: Course,
    /// Since when it does not answer, and why.
    trouble: Option<(Instant, String)>,
}

impl Live {
    fn hear(&mut self, at: Instant, told: Result<Told, String>) {
        match told {
            Ok(told) => {
                let asked = self.course.asked();
                if asked.is_some_and(|asked| at.saturating_duration_since(asked) > UNSEEN)
                    && self.trouble.is_none()
                {
                    // Nobody looked meanwhile: a rate over that time is none of now.
                    self.course = Course::default();
                }
                self.trouble = None;
                self.server = escape(&told.server);
                self.course.heard(at, told.counted);
            }
            Err(error) => {
                let since = self.trouble.take().map_or(at, |(since, _)| since);
                self.trouble = Some((since, escape(&error)));
                self.course.missed();
            }
        }
    }

    fn to_json(&self, now: Instant) -> Value {
        let course = &self.course;
        let (mut sources, mut ports, mut vms) = (course.sources(), course.ports(), course.vms());
        let counts = json!({ "sources": sources.len(), "ports": ports.len(), "vms": vms.len() });
        // Those that lose are seen, then those that do most.
        keep(&mut sources, |it| (it.lost.0, it.seen));
        keep(&mut ports, |it| (it.lost.0, it.delivered));
        keep(&mut vms, |it| (it.lost, it.delivered));
        let [seen, bits, delivered] = course.totals();
        let stages = STAGES.iter().zip(course.stages());
        let stages = stages.map(|(stage, curve)| {
            json!({
                "name": stage.name, "help": stage.help, "lost": stage.of_all(course.now()),
                "now": rounded(curve.last()), "curve": rates(curve, HISTORY),
            })
        });
        let trouble = self.trouble.as_ref();
        json!({
            "socket": self.place,
            "server": self.server,
            "error": trouble.map(|(_, why)| why),
            "silent_seconds": trouble.map(|(since, _)| now.saturating_duration_since(*since).as_secs()),
            // Who may not see it all is not told about the daemon itself.
            "sees_all": course.now().iter().any(|it| it.kind == "daemon"),
            "restarts": course.restarts(),
            "most": MOST,
            "counts": counts,
            "totals": { "seen": rates(seen, HISTORY), "bits": rates(bits, HISTORY), "delivered": rates(delivered, HISTORY) },
            "lost": course.lost(),
            "stages": stages.collect::<Vec<_>>(),
            "sources": sources.iter().map(|it| self.source(it)).collect::<Vec<_>>(),
            "ports": ports.iter().map(|it| self.port(it)).collect::<Vec<_>>(),
            "vms": vms.iter().map(vm).collect::<Vec<_>>(),
        })
    }

    fn source(&self, it: &SourceRow<'_>) -> Value {
        json!({
            "name": escape(&it.thing.name), "kind": escape(it.kind),
            "state": escape(it.state), "bad": it.is_bad,
            "seen": rounded(it.seen), "bits": rounded(it.bits),
            "losing": rounded(it.lost.0), "lost": it.lost.1,
            "early": rounded(it.early), "patience_ms": it.patience_ms, "curve": self.curve(it.thing),
        })
    }

    fn port(&self, it: &PortRow<'_>) -> Value {
        json!({
            "name": escape(&it.thing.name), "device": escape(&it.device), "reader": escape(it.reader),
            "state": escape(it.state), "bad": it.is_bad,
            "delivered": rounded(it.delivered), "bits": rounded(it.bits),
            "losing": rounded(it.lost.0), "lost": it.lost.1,
            "patience_ms": it.patience_ms, "owner": escape(it.owner), "group": escape(it.group),
            "curve": self.curve(it.thing),
        })
    }

    fn curve(&self, thing: &Counted) -> Vec<f64> {
        let curve = self.course.curve(&key(thing));
        curve.map_or(Vec::new(), |curve| rates(curve, SHORT))
    }
}

fn vm(it: &VmRow<'_>) -> Value {
    json!({
        "name": escape(&it.thing.name), "kind": escape(it.kind), "state": escape(it.state), "bad": it.is_bad,
        "ports": it.ports, "delivered": rounded(it.delivered), "losing": rounded(it.lost),
        "pool_bytes": it.pool_bytes, "used_percent": rounded(it.used_percent()),
    })
}

/// Keeps the [`MOST`] rows of the greatest figures.
fn keep<T>(rows: &mut Vec<T>, by: impl Fn(&T) -> (f64, f64)) {
    rows.sort_by(|a, b| {
        let (a, b) = (by(a), by(b));
        b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1))
    });
    rows.truncate(MOST);
}

fn rates(curve: &Curve, most: usize) -> Vec<f64> {
    curve.rates(most).map(rounded).collect()
}

/// To a tenth: more digits would only make the answer longer.
fn rounded(rate: f64) -> f64 {
    (rate * 10.0).round() / 10.0
}

/// Rows of a table.
const MOST: usize = 200;
/// Rates that the curve of a row shows.
const SHORT: usize = 20;
/// After this time without an answer the next one begins anew.
const UNSEEN: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(kind: &str, name: &str, labels: &[(&str, &str)], values: &[(&str, u64)]) -> Counted {
        let labels = labels.iter().map(|(k, v)| ((*k).into(), (*v).into()));
        Counted {
            kind: kind.into(),
            name: name.into(),
            labels: labels.collect(),
            values: values.iter().map(|(k, v)| ((*k).into(), *v)).collect(),
        }
    }

    fn told(counted: Vec<Counted>) -> Result<Told, String> {
        Ok(Told {
            server: "vnplugd 0.1.0".into(),
            counted,
            took: Duration::ZERO,
        })
    }

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn strangers_words_cannot_hide_or_turn_the_text() {
        let mut live = Live::default();
        let bad = "a\u{202e}gpj\u{200b}<script>\n\u{1b}[2J";
        let labels = [
            ("label", bad),
            ("group", bad),
            ("owner", bad),
            ("device", bad),
            ("state", bad),
        ];
        let all = vec![
            counted("port", "1", &labels, &[]),
            counted("vm", bad, &[("kind", bad), ("state", bad)], &[]),
            counted("source", bad, &[("kind", bad), ("state", bad)], &[]),
        ];
        live.hear(Instant::now(), told(all));
        live.hear(Instant::now(), Err(bad.into()));
        let text = live.to_json(Instant::now()).to_string();
        for c in ['\u{202e}', '\u{200b}', '\u{1b}', '\n'] {
            assert!(!text.contains(c), "{c:?}");
        }
        // Only JSON's own escapes are left: `\n` and `\u001b` would be characters of the page.
        assert!(!text.contains("\\n") && !text.contains("\\u001b"), "{text}");
        assert!(text.contains("a\\\\u{202e}gpj"), "{text}");
    }

    #[test]
    fn of_many_ports_those_that_lose_and_read_most_are_shown() {
        let mut live = Live::default();
        let ports = |n: u64| {
            let port = |id: u64| {
                let values = [
                    ("delivered", id * n),
                    ("dropped_full", if id == 3 { 7 * n } else { 0 }),
                ];
                counted("port", &id.to_string(), &[("state", "open")], &values)
            };
            (1..=1000).map(port).collect::<Vec<_>>()
        };
        let start = Instant::now();
        live.hear(start, told(ports(0)));
        live.hear(at(start, 1), told(ports(1)));
        let json = live.to_json(at(start, 1));
        let shown = json["ports"].as_array().unwrap();
        assert_eq!(
            (shown.len(), &json["counts"]["ports"]),
            (MOST, &json!(1000))
        );
        assert_eq!(
            (&shown[0]["name"], &shown[1]["name"]),
            (&json!("3"), &json!("1000"))
        );
        assert_eq!(json["stages"][2]["now"], 7.0);
        assert!(
            json.to_string().len() < 200_000,
            "{}",
            json.to_string().len()
        );
    }

    #[test]
    fn a_daemon_that_is_away_is_told_and_what_nobody_saw_is_no_rate() {
        let mut live = Live::default();
        let start = Instant::now();
        live.hear(start, Err("nobody is there".into()));
        live.hear(at(start, 2), Err("nobody is there".into()));
        let json = live.to_json(at(start, 5));
        assert_eq!(
            (&json["error"], &json["silent_seconds"]),
            (&json!("nobody is there"), &json!(5))
        );
        assert_eq!(json["sources"], json!([]));
        let source = |seen| told(vec![counted("source", "eth1", &[], &[("seen", seen)])]);
        live.hear(at(start, 6), source(0));
        live.hear(at(start, 7), source(100));
        let json = live.to_json(at(start, 7));
        assert_eq!(
            (&json["error"], &json["sources"][0]["seen"]),
            (&Value::Null, &json!(100.0))
        );
        assert_eq!(json["totals"]["seen"], json!([100.0]));
        // A minute later somebody opens the page again.
        live.hear(at(start, 67), source(100_000));
        let json = live.to_json(at(start, 67));
        assert_eq!(json["totals"]["seen"], json!([]));
    }
}
