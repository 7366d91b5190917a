accelerate launch --config_file accelerate-deepspeed.yaml --num_processes 4 --main_process_port 29501 \
  train.py hf-recipe.yaml --gradient_accumulation_steps=8
