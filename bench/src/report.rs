//! The table on the terminal and the file of the figures.

use std::path::Path;

use serde_json::{Value, json};

use crate::goal::Goal;
use crate::row::{Figure, Limit, Result, Samples};

/// Names of rows, each with the reason why it has no figures.
pub(crate) type Failed<'a> = [(&'a str, String)];

/// Prints the machine, one line per figure, and one per row that failed.
pub(crate) fn print(figures: &[Figure], failed: &Failed<'_>) {
    println!("{}", machine());
    println!(
        "{:<28} {:>10} {:>19}  {:<22} {:>10} {:>19} {:>7} {:>10} {:>7}",
        "row", "ours", "min..max", "peer", "peer's", "min..max", "ratio", "limit", "reached"
    );
    for figure in figures {
        let (peer, value, spread) = match &figure.peer {
            Some((name, samples)) => (name.as_str(), number(samples.median()), range(samples)),
            None => ("-", "-".to_owned(), "-".to_owned()),
        };
        let ratio = figure
            .ratio()
            .map_or("-".to_owned(), |ratio| format!("{}x", number(ratio)));
        let (limit, reached) = bound(figure);
        println!(
            "{:<28} {:>10} {:>19}  {:<22} {:>10} {:>19} {:>7} {limit:>10} {reached:>7}  {}",
            figure.name,
            number(figure.ours.median()),
            range(&figure.ours),
            peer,
            value,
            spread,
            ratio,
            figure.unit,
        );
    }
    let judged: Vec<_> = goals(figures).collect();
    if !judged.is_empty() {
        println!("\ngoals; in brackets the share of the machine's limit that ours reaches");
    }
    for (figure, goal, verdict) in judged {
        let (ours, unit) = (number(figure.ours.median()), figure.unit);
        let spread = range(&figure.ours);
        let ratio = figure.ratio();
        let ratio = ratio.map_or(String::new(), |ratio| {
            format!(", {}x its peer", number(ratio))
        });
        let limit = match (&figure.limit, figure.reached()) {
            (Some(limit), Some(reached)) => {
                format!(" ({} of {})", share(reached), limit.what)
            }
            _ => String::new(),
        };
        let (name, words) = (&figure.name, goal.words());
        println!("{verdict:<10} {name:<34} {words:<10} {ours} ({spread}) {unit}{ratio}{limit}");
    }
    for (row, reason) in failed {
        println!("{row:<28} FAILED: {reason}");
    }
}

/// Every figure that has a goal, with the verdict; what was missed first.
fn goals(figures: &[Figure]) -> impl Iterator<Item = (&Figure, Goal, &'static str)> {
    let of = |wanted: &'static str| {
        let with_goal = figures
            .iter()
            .filter_map(|figure| Some((figure, Goal::of(figure)?)));
        with_goal
            .map(|(figure, goal)| (figure, goal, verdict(figure, goal)))
            .filter(move |(_, _, verdict)| *verdict == wanted)
    };
    [MISSED, NOT_JUDGED, IN_DOUBT, MET].into_iter().flat_map(of)
}

/// Whether the median meets a goal, and no round says otherwise. Of ratios the median decides: the
/// peer of a round is not known here.
fn verdict(figure: &Figure, goal: Goal) -> &'static str {
    let (lowest, highest) = figure.ours.range();
    let in_doubt = match goal {
        Goal::AtMost(most) => highest > most,
        Goal::AtLeast(least) => lowest < least,
        Goal::TimesPeer(_) | Goal::ShareOfPeer(_) => false,
    };
    match goal.is_met(figure) {
        Some(true) if in_doubt => IN_DOUBT,
        Some(true) => MET,
        Some(false) => MISSED,
        None => NOT_JUDGED,
    }
}

/// The figures that have a goal, as a table in Markdown, what was missed first.
pub(crate) fn goals_table(figures: &[Figure]) -> String {
    let mut text = "| row | goal | verdict | ours | ratio | limit | reached |\n\
                    |---|---|---|---|---|---|---|\n"
        .to_owned();
    for (figure, goal, verdict) in goals(figures) {
        let ratio = figure.ratio().map_or("–".to_owned(), number);
        let (value, reached) = bound(figure);
        let limit = figure.limit.as_ref();
        let limit = limit.map_or("–".to_owned(), |limit| format!("{}: {value}", limit.what));
        let verdict = verdict.replace(MISSED, "**missed**");
        text += &format!(
            "| `{}` | {} | {verdict} | {} ({}) {} | {ratio} | {limit} | {} |\n",
            figure.name,
            goal.words(),
            number(figure.ours.median()),
            range(&figure.ours).replace("..", "–"),
            figure.unit,
            reached.replace('-', "–"),
        );
    }
    text
}

/// The limit's median and the share that ours reaches, in words.
fn bound(figure: &Figure) -> (String, String) {
    let none = || "-".to_owned();
    let limit = figure.limit.as_ref();
    (
        limit.map_or_else(none, |limit| number(limit.samples.median())),
        figure.reached().map_or_else(none, share),
    )
}

/// A share of the limit: a percentage, and from ten times the limit on a factor.
fn share(reached: f64) -> String {
    match reached {
        10.0.. => format!("{reached:.0} ×"),
        _ => format!("{:.0} %", reached * 100.0),
    }
}

/// What the figures depend on most; a word is missing where the system does not tell it.
pub(crate) fn machine() -> String {
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpus = text("/proc/cpuinfo");
    let mut models = cpus
        .lines()
        .filter(|line| line.starts_with("model name"))
        .filter_map(|line| line.split(": ").nth(1));
    let model = models.next().unwrap_or("unknown processor");
    format!(
        "{} x {model}, L2 {} each, Linux {}",
        1 + models.count(),
        text("/sys/devices/system/cpu/cpu0/cache/index2/size").trim_end(),
        text("/proc/sys/kernel/osrelease").trim_end(),
    )
}

/// Writes the figures as a JSON list; a row that failed has no value, and a note that says why.
pub(crate) fn save(figures: &[Figure], failed: &Failed<'_>, path: &Path) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mut list: Vec<Value> = figures.iter().map(object).collect();
    list.extend(failed.iter().map(|(row, reason)| nothing(row, reason)));
    std::fs::write(path, serde_json::to_string_pretty(&list)? + "\n")?;
    Ok(())
}

fn object(figure: &Figure) -> Value {
    let (peer, limit) = (figure.peer.as_ref(), figure.limit.as_ref());
    json!({
        "name": figure.name,
        "value": figure.ours.median(),
        "unit": figure.unit,
        "spread": spread(&figure.ours),
        "peer": peer.map(|(name, _)| name),
        "peer_value": peer.map(|(_, samples)| samples.median()),
        "peer_spread": peer.map(|(_, samples)| spread(samples)),
        "ratio": figure.ratio(),
        "limit": limit.map(|limit| &limit.what),
        "limit_value": limit.map(|limit| limit.samples.median()),
        "limit_spread": limit.map(|limit| spread(&limit.samples)),
        "reached": figure.reached(),
        "note": figure.note,
    })
}

/// The same as a table in Markdown, as `docs/results.md` has it.
pub(crate) fn markdown<'f>(figures: impl IntoIterator<Item = &'f Figure>) -> String {
    let mut text =
        "| row | unit | ours | lowest–highest | peer | lowest–highest | ratio | limit | \
                    reached | goal |\n|---|---|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    for figure in figures {
        let (peer, spread) = match &figure.peer {
            Some((name, samples)) => {
                let median = number(samples.median());
                (format!("{name} {median}"), range(samples))
            }
            None => ("-".to_owned(), "-".to_owned()),
        };
        let ratio = figure.ratio().map_or("-".to_owned(), number);
        let goal = Goal::of(figure).map_or("-".to_owned(), |goal| match verdict(figure, goal) {
            NOT_JUDGED => goal.words(),
            verdict => format!(
                "{}: {}",
                goal.words(),
                verdict.replace(MISSED, "**missed**")
            ),
        });
        let (limit, reached) = bound(figure);
        let (name, unit, ours) = (&figure.name, figure.unit, number(figure.ours.median()));
        let ours_spread = range(&figure.ours);
        let name = format!("`{name}`");
        let cells = [
            &name,
            unit,
            &ours,
            &ours_spread,
            &peer,
            &spread,
            &ratio,
            &limit,
            &reached,
            &goal,
        ]
        .map(|cell| if cell == "-" { "–" } else { cell });
        text += &format!("| {} |\n", cells.join(" | ").replace("..", "–"));
    }
    text
}

fn nothing(row: &str, reason: &str) -> Value {
    json!({
        "name": row,
        "value": null,
        "unit": null,
        "spread": null,
        "peer": null,
        "peer_value": null,
        "peer_spread": null,
        "ratio": null,
        "limit": null,
        "limit_value": null,
        "limit_spread": null,
        "reached": null,
        "note": format!("failed: {reason}"),
    })
}

/// A figure with all its samples, for [`parse`].
pub(crate) fn whole(figure: &Figure) -> Value {
    let (peer, limit) = (figure.peer.as_ref(), figure.limit.as_ref());
    json!({
        "name": figure.name,
        "unit": figure.unit,
        "ours": figure.ours.all(),
        "peer": peer.map(|(name, _)| name),
        "theirs": peer.map(|(_, samples)| samples.all()),
        "limit": limit.map(|limit| &limit.what),
        "allowed": limit.map(|limit| limit.samples.all()),
        "note": figure.note,
    })
}

/// What [`whole`] made.
pub(crate) fn parse(value: &Value) -> Option<Figure> {
    let text = |name: &str| value[name].as_str().map(str::to_owned);
    let samples = |name: &str| {
        let mut samples = Samples::default();
        let list = value[name].as_array()?;
        list.iter()
            .filter_map(Value::as_f64)
            .for_each(|sample| samples.push(sample));
        Some(samples)
    };
    Some(Figure {
        name: text("name")?,
        // NB: a figure's unit is a constant of its row; a few hundred short words stay in memory.
        unit: text("unit")?.leak(),
        ours: samples("ours")?,
        peer: text("peer").zip(samples("theirs")),
        limit: text("limit")
            .zip(samples("allowed"))
            .map(|(what, samples)| Limit { what, samples }),
        note: text("note")?,
    })
}

/// The figures of a file that [`save`] wrote: their medians and ranges stand for the samples.
pub(crate) fn load(path: &Path) -> Result<Vec<Figure>> {
    let list: Vec<Value> = serde_json::from_slice(&std::fs::read(path)?)?;
    let samples = |value: &Value, spread: &Value| {
        let mut samples = Samples::default();
        samples.push(value.as_f64()?);
        samples.push(spread[0].as_f64()?);
        samples.push(spread[1].as_f64()?);
        Some(samples)
    };
    let figure = |value: &Value| {
        let text = |name: &str| value[name].as_str().map(str::to_owned);
        Some(Figure {
            name: text("name")?,
            unit: text("unit")?.leak(),
            ours: samples(&value["value"], &value["spread"])?,
            peer: text("peer").zip(samples(&value["peer_value"], &value["peer_spread"])),
            limit: text("limit")
                .zip(samples(&value["limit_value"], &value["limit_spread"]))
                .map(|(what, samples)| Limit { what, samples }),
            note: text("note")?,
        })
    };
    // A row that failed has no value.
    Ok(list.iter().filter_map(figure).collect())
}

fn spread(samples: &Samples) -> Value {
    let (min, max) = samples.range();
    json!([min, max])
}

fn range(samples: &Samples) -> String {
    let (min, max) = samples.range();
    format!("{}..{}", number(min), number(max))
}

fn number(value: f64) -> String {
    match value.abs() {
        1000.0.. => format!("{value:.0}"),
        0.1.. => format!("{value:.2}"),
        0.0 => "0".to_owned(),
        0.001.. => format!("{value:.4}"),
        _ => format!("{value:.6}"),
    }
}

/// Verdicts.
const MISSED: &str = "MISSED";
const NOT_JUDGED: &str = "not judged";
/// The median meets the goal and some round does not.
const IN_DOUBT: &str = "in doubt";
const MET: &str = "met";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_without_a_peer_has_nulls() {
        let mut ours = Samples::default();
        ours.push(2.5);
        let figure = Figure {
            name: "x".into(),
            unit: "Mpps",
            ours,
            peer: None,
            limit: Some(Limit::new("the wire", [5.0].into_iter().collect())),
            note: "n".into(),
        };
        let value = object(&figure);
        assert_eq!(value["reached"], 0.5);
        assert_eq!(value["value"], 2.5);
        assert_eq!(value["spread"], json!([2.5, 2.5]));
        assert!(value["peer"].is_null() && value["ratio"].is_null());
        let again = parse(&whole(&figure)).unwrap();
        assert_eq!(object(&again), value);
        let path = std::env::temp_dir().join(format!("vnplug-bench-{}", std::process::id()));
        save(&[again], &[("y", "why".into())], &path).unwrap();
        let loaded = load(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(loaded.len(), 1);
        assert_eq!(object(&loaded[0]), value);
    }

    #[test]
    fn a_share_of_ten_and_more_is_a_factor() {
        let shares = [0.004, 0.7, 1.14, 9.99, 10.0, 33.61, 366.35].map(share);
        assert_eq!(
            shares,
            ["0 %", "70 %", "114 %", "999 %", "10 ×", "34 ×", "366 ×"]
        );
    }

    #[test]
    fn a_goal_that_a_round_misses_is_in_doubt() {
        let figure = |samples: &[f64]| Figure {
            name: String::new(),
            unit: "ns",
            ours: samples.iter().copied().collect(),
            peer: None,
            limit: None,
            note: String::new(),
        };
        let rounds: [&[f64]; 3] = [&[1.0, 2.0, 3.0], &[-9.0, 2.0, 6.0], &[1.0, 6.0, 7.0]];
        let verdicts = rounds.map(|rounds| verdict(&figure(rounds), Goal::AtMost(5.0)));
        assert_eq!(verdicts, [MET, IN_DOUBT, MISSED]);
    }
}
