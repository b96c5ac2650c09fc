//! The answer: a table, CSV, lines of JSON, or Parquet.

use std::fs::{self, File};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

use datafusion::arrow::array::{Array, RecordBatch};
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::arrow::json::writer::{LineDelimited, WriterBuilder};
use datafusion::arrow::util::display::{ArrayFormatter, FormatOptions};
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::parquet::arrow::ArrowWriter;
use vnplug_store::extract::forbidden;

use crate::beside;
use crate::failure::Failure;
use crate::leftover::Leftover;
use crate::out::{escape, failed};

/// How an answer is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// For people
    Table,
    /// Comma-separated, with a line of names
    Csv,
    /// An object per line
    Json,
    /// Apache Parquet; needs `-o FILE`
    Parquet,
}

impl Format {
    /// What a file's name says, if it says something.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "csv" => Some(Self::Csv),
            "json" | "jsonl" | "ndjson" => Some(Self::Json),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }
}

type Sink = BufWriter<Box<dyn Write + Send>>;

/// Where the answer goes.
pub(crate) struct Output {
    writer: Writer,
    /// A file under another name until it is whole.
    pending: Option<(Leftover, PathBuf)>,
}

enum Writer {
    Table(Table),
    /// With what a terminal would obey escaped, or as it is.
    Csv(Sink, bool),
    Json(Sink),
    Parquet(Box<ArrowWriter<Sink>>),
}

impl Output {
    /// Opens it: a file, or standard output. `places` are what is read, which it must not be.
    ///
    /// # Errors
    /// [`Failure`] if it cannot be written, or is one of the files that are read.
    pub(crate) fn open(
        file: Option<&Path>,
        format: Format,
        schema: &SchemaRef,
        places: &[PathBuf],
    ) -> Result<Self, Failure> {
        let mut pending = None;
        let to: Box<dyn Write + Send> = match file {
            None => Box::new(io::stdout()),
            Some(path) => {
                refuse(path, places)?;
                let fail = |error| Failure::about(path.display(), error);
                // A pipe or a device cannot be replaced.
                let special = fs::metadata(path).is_ok_and(|about| !about.is_file());
                let mut temporary = path.as_os_str().to_owned();
                if !special {
                    temporary.push(".part");
                }
                refuse(Path::new(&temporary), places)?;
                let opened = File::create(&temporary).map_err(fail)?;
                pending = (!special).then(|| (Leftover::new(temporary.into()), path.to_owned()));
                Box::new(opened)
            }
        };
        let mut to = BufWriter::new(to);
        let writer = match format {
            Format::Table => Writer::Table(Table {
                to,
                schema: schema.clone(),
                held: Vec::new(),
                rows: 0,
                is_first: true,
            }),
            Format::Csv => {
                let names: Vec<&str> = schema.fields().iter().map(|f| f.name().as_str()).collect();
                let is_terminal = file.is_none() && io::stdout().is_terminal();
                line(&mut to, names.into_iter(), is_terminal)?;
                Writer::Csv(to, is_terminal)
            }
            Format::Json => Writer::Json(to),
            Format::Parquet => {
                let properties = Some(beside::properties());
                let writer = ArrowWriter::try_new(to, schema.clone(), properties)?;
                Writer::Parquet(Box::new(writer))
            }
        };
        Ok(Self { writer, pending })
    }

    /// Writes a part of it.
    ///
    /// # Errors
    /// [`Failure`] if it cannot be written.
    pub(crate) fn write(&mut self, batch: RecordBatch) -> Result<(), Failure> {
        match &mut self.writer {
            Writer::Table(table) => table.add(batch),
            Writer::Csv(to, is_terminal) => csv(to, &batch, *is_terminal),
            Writer::Json(to) => json(to, &batch),
            Writer::Parquet(writer) => writer.write(&batch).map_err(Failure::from),
        }
    }

    /// All was written.
    ///
    /// # Errors
    /// [`Failure`] if the rest cannot be written.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        let mut to = match self.writer {
            Writer::Table(mut table) => {
                if table.is_first || table.rows > 0 {
                    table.print()?;
                }
                table.to
            }
            Writer::Csv(to, _) | Writer::Json(to) => to,
            Writer::Parquet(writer) => writer.into_inner()?,
        };
        to.flush().map_err(failed)?;
        drop(to);
        if let Some((temporary, path)) = self.pending {
            fs::rename(temporary.path(), &path)
                .map_err(|error| Failure::about(path.display(), error))?;
            temporary.keep();
        }
        Ok(())
    }
}

/// A table for people, in parts: memory is limited, and each part has its own widths of columns.
struct Table {
    to: Sink,
    schema: SchemaRef,
    held: Vec<RecordBatch>,
    rows: usize,
    is_first: bool,
}

impl Table {
    fn add(&mut self, batch: RecordBatch) -> Result<(), Failure> {
        self.rows += batch.num_rows();
        self.held.push(batch);
        match self.rows >= TABLE_ROWS {
            true => self.print(),
            false => Ok(()),
        }
    }

    fn print(&mut self) -> Result<(), Failure> {
        if self.held.is_empty() {
            self.held.push(RecordBatch::new_empty(self.schema.clone()));
        }
        let text = pretty_format_batches(&self.held)?.to_string();
        writeln!(self.to, "{}", escape(&text)).map_err(failed)?;
        self.held.clear();
        (self.rows, self.is_first) = (0, false);
        Ok(())
    }
}

fn csv(to: &mut Sink, batch: &RecordBatch, is_terminal: bool) -> Result<(), Failure> {
    let options = FormatOptions::default();
    let columns: Vec<ArrayFormatter<'_>> = batch
        .columns()
        .iter()
        .map(|column| ArrayFormatter::try_new(column.as_ref(), &options))
        .collect::<Result<_, _>>()?;
    for row in 0..batch.num_rows() {
        let mut values = Vec::with_capacity(columns.len());
        for (column, array) in columns.iter().zip(batch.columns()) {
            values.push(match array.is_null(row) {
                true => String::new(),
                false => column.value(row).try_to_string()?,
            });
        }
        line(to, values.iter().map(String::as_str), is_terminal)?;
    }
    Ok(())
}

/// A line of CSV (RFC 4180, but for the end of the line).
fn line<'a>(
    to: &mut impl Write,
    values: impl Iterator<Item = &'a str>,
    is_terminal: bool,
) -> Result<(), Failure> {
    let quoted = |value: &str| match value.contains(['"', ',', '\n', '\r']) {
        true => format!("\"{}\"", value.replace('"', "\"\"")),
        false => value.to_owned(),
    };
    let values: Vec<String> = values.map(quoted).collect();
    let line = values.join(",");
    let line = if is_terminal { escape(&line) } else { line };
    writeln!(to, "{line}").map_err(failed)
}

fn json(to: &mut Sink, batch: &RecordBatch) -> Result<(), Failure> {
    let mut lines = Vec::new();
    let mut writer = WriterBuilder::new()
        .with_explicit_nulls(true)
        .build::<_, LineDelimited>(&mut lines);
    writer.write(batch)?;
    writer.finish()?;
    drop(writer);
    to.write_all(&lines).map_err(failed)
}

/// The answer must not replace what it is made from.
fn refuse(path: &Path, places: &[PathBuf]) -> Result<(), Failure> {
    let text = path.to_string_lossy();
    let why = match text.ends_with(".flows.parquet") {
        true => Some("such names are of the files beside segments: write to another file"),
        false => forbidden(path, places),
    };
    why.map_or(Ok(()), |why| Err(Failure::about(path.display(), why)))
}

/// Rows of a table that are held at once.
const TABLE_ROWS: usize = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_is_as_it_is_but_for_a_terminal() {
        let written = |is_terminal| {
            let mut to = Vec::new();
            line(&mut to, ["a,\"\x1b[2J", "b"].into_iter(), is_terminal).unwrap();
            String::from_utf8(to).unwrap()
        };
        assert_eq!(written(false), "\"a,\"\"\x1b[2J\",b\n");
        assert_eq!(written(true), "\"a,\"\"\\u{1b}[2J\",b\n");
    }
}
